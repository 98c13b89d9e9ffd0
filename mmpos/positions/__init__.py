"""Where tokens are.

Positions are one plain tensor ``[..., L, A]``: a row per token, a column per axis, the slowest axis
first (time, height, width). They are raw indices or physical units (seconds), integer or float32;
a coordinate that a token does not have is NaN, and contributes nothing to any encoding.
"""

from mmpos.positions.base import Axes as Axes
from mmpos.positions.base import absent as absent
from mmpos.positions.base import axis_count as axis_count
from mmpos.positions.base import check as check
from mmpos.positions.base import check_size as check_size
from mmpos.positions.base import grid as grid
from mmpos.positions.base import grid_of as grid_of
from mmpos.positions.base import join as join
from mmpos.positions.base import sequence as sequence
from mmpos.positions.batches import Packed as Packed
from mmpos.positions.batches import Ragged as Ragged
from mmpos.positions.batches import chosen as chosen
from mmpos.positions.batches import packed as packed
from mmpos.positions.batches import padded as padded
from mmpos.positions.batches import ragged as ragged
from mmpos.positions.batches import seconds as seconds
from mmpos.positions.counting import Counting as Counting
from mmpos.positions.counting import blocks as blocks
from mmpos.positions.multimodal import Multimodal as Multimodal
from mmpos.positions.multimodal import of_parts as of_parts
from mmpos.positions.multimodal import of_rows as of_rows
from mmpos.positions.parts import Audio as Audio
from mmpos.positions.parts import Image as Image
from mmpos.positions.parts import Interleaved as Interleaved
from mmpos.positions.parts import Part as Part
from mmpos.positions.parts import Text as Text
from mmpos.positions.parts import Video as Video
from mmpos.positions.token_types import of_types as of_types
