"""Weights of a network for images, as a start for one of clips."""

import torch
from torch import Tensor, nn

from mmpos.additive import FactorizedEncoding, LearnedEncoding
from mmpos.bias import RelativePositionBias, T5Bias
from mmpos.models import TubeletEmbedding
from mmpos.models.tubelets import inflated_kernel


def inflated(network: nn.Module, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """``state``, of a network for images, with time added where ``network`` has it; and what was.

    Patch kernels are shared out among the frames of a tubelet, and tables, of positions or of
    offsets, are the same at all times (ViViT, arXiv:2103.15691, sec. 3.4); factorised tables that
    are summed get one of zeros for time, and so does T5's bias. So, with these encodings or none, a
    still clip is answered as its image was; but for class and register tokens, which weigh less
    against more patches. What has time already, or is of other sizes, stays as it is.
    """
    state, told = dict(state), []
    for path, part in network.named_modules():
        if isinstance(part, TubeletEmbedding):
            name = f"{path}.project.weight".lstrip(".")
            if (kernel := state.get(name)) is not None and kernel.ndim == 4:
                state[name] = inflated_kernel(kernel, part.own_patch_size[0])
                told.append(name)
        elif isinstance(part, LearnedEncoding | RelativePositionBias) and len(part.grid) == 3:
            name, own = f"{path}.table".lstrip("."), part.table
            if (table := state.get(name)) is not None and table.ndim == 3:
                state[name] = table.expand(own.shape[0], *table.shape).clone()
                told.append(name)
        elif isinstance(part, T5Bias) and len(part.sizes) == 3:
            name, (time, *space) = f"{path}.table".lstrip("."), part.sizes
            if (table := state.get(name)) is not None and len(table) == sum(space):
                state[name] = torch.cat((table.new_zeros(time, *table.shape[1:]), table))
                told.append(name)
        elif isinstance(part, FactorizedEncoding) and len(part.grid) == 3:
            names = [f"{path}.table.{axis}".lstrip(".") for axis in range(3)]
            if part.combine == "sum" and names[1] in state and names[2] not in state:
                state[names[2]], state[names[1]] = state[names[1]], state[names[0]]
                state[names[0]] = part.table[0].new_zeros(part.table[0].shape).cpu()
                told.append(names[0].removesuffix(".0"))
    return state, told
