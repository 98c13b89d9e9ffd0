"""Every shipped config is run for a few steps."""

import sys
from pathlib import Path

import pytest
import torch
import yaml

from tasks import cli, configs

NAMES = list(configs.shipped())
JOBS = ["algorithm", "audio", "image", "multimodal", "needles", "text"]
JOBS += ["text_classification", "video"]
CAUSAL_JOBS = ["algorithm", "needles", "text"]
CAUSAL = ["encoding/fire", "encoding/xpos"]  # encodings of causal models of one axis
COMPARED = ["encoding/alibi", "encoding/none"]  # of needles; algorithm is the same task of all
ON_WEIGHTS = ["extend_context", "finetune_resolution"]  # by test_extend_context, test_main_job
ON_TIMM = ["finetune_timm"]  # run by test_timm_backbone, with weights that need no download
ENCODINGS = [name for name in NAMES if name.startswith("encoding/")]
FEW = [
    "--trainer.fast_dev_run=2",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]


def slots(name: str) -> dict:
    content = yaml.safe_load(configs.shipped()[name].read_text())
    return content["model"]["init_args"]["transformer"]["init_args"]


def test_what_is_shipped() -> None:
    assert sorted(JOBS + ON_WEIGHTS + ON_TIMM) == [name for name in NAMES if "/" not in name]
    kinds = ["alibi", "factorized", "fire", "kerple", "learned", "mrope", "none", "rope"]
    kinds += ["sinusoidal", "t5", "transformer_xl", "xpos"]
    assert [f"encoding/{kind}" for kind in kinds] == ENCODINGS
    others = {name.partition("/")[0] for name in NAMES if "/" in name}
    assert others == {"encoding", "extension", "network", "trainer"}
    # extensions are run by test_extend_context


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_encoding_sets_all_three_slots_so_that_it_replaces(name: str) -> None:
    assert set(slots(name)) == {"additive", "rotary", "bias"}


def test_settings_of_one_encoding_do_not_stay_with_the_next(capsys: pytest.CaptureFixture) -> None:
    """Such as the base of RoPE, which xPos has too."""
    shown = []
    for over in ([], ["--config", "encoding/rope"]):
        with pytest.raises(SystemExit):
            given = ["--config", "text", *over, "--config", "encoding/xpos", "--print_config"]
            cli.main(["fit", *given])
        shown.append(yaml.safe_load(capsys.readouterr().out))
    assert shown[0] == shown[1]
    rotary = shown[0]["model"]["init_args"]["transformer"]["init_args"]["rotary"]
    assert (rotary["class_path"], rotary["init_args"]["base"]) == ("mmpos.XPosEncoding", 10000)


@pytest.mark.parametrize("name", NAMES)
def test_each_config_begins_with_a_comment(name: str) -> None:
    assert configs.shipped()[name].read_text().startswith("# ")


@pytest.mark.parametrize(
    ("job", "encoding"),
    [
        (j, e)
        for j in JOBS
        for e in ENCODINGS
        if (e not in CAUSAL or j in CAUSAL_JOBS) and (j != "needles" or e in COMPARED)
    ],
)
@pytest.mark.filterwarnings("ignore:RoPE with base 100")  # which is for patches
def test_each_encoding_over_each_job(
    job: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last config wins whatever came before, and the job trains, validates and tests."""
    monkeypatch.chdir(tmp_path)
    over = ["--config", job, "--config", "encoding/alibi", "--config", encoding]
    if (job, encoding) == ("multimodal", "encoding/learned"):  # a table of all three axes is none
        over.append("--model.layout=sequence")
    assert cli.main(["fit", *over, *FEW]) == 0


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_last_encoding_wins(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    others = [arg for name in ENCODINGS if name != encoding for arg in ("--config", name)]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["fit", "--config", "image", *others, "--config", encoding, "--print_config"])
    assert stopped.value.code in (0, None)
    built = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["transformer"]
    for slot, wanted in slots(encoding).items():
        found = built["init_args"][slot]
        assert (found and found["class_path"]) == (wanted and wanted["class_path"]), slot


@pytest.mark.parametrize("job", CAUSAL_JOBS)
def test_a_network_without_positions_over_each_causal_job(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    over = ["--config", job, "--config", "network/mamba2"]
    assert cli.main(["fit", *over, *FEW]) == 0


@pytest.mark.parametrize("encoding", [None, "encoding/rope", "encoding/alibi"])
def test_patches_of_a_spectrogram(
    encoding: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    over = ["--config", "audio", "--config", "network/ast"]
    over += ["--config", encoding] if encoding else []
    assert cli.main(["fit", *over, *FEW]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="forks its processes")
@pytest.mark.parametrize("job", JOBS)
def test_each_job_on_two_processes(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``--trainer.strategy ddp``, but that the second is forked, for time; and with a warning
    that advises against more threads than cores.
    """
    monkeypatch.chdir(tmp_path)
    two = ["--config", "trainer/ddp", "--trainer.devices=2", "--data.batch_size=8"]
    two += ["--trainer.strategy.start_method=fork", "--trainer.strategy.process_group_backend=gloo"]
    assert cli.main(["fit", "--config", job, *two, *FEW]) == 0


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_each_job_in_half_precision(
    job: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    half = [f"--trainer.precision={precision}", "--trainer.limit_test_batches=1"]
    assert cli.main(["fit", "--config", job, *FEW, *half]) == 0


def test_the_overlay_for_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint is the third, beside the best and the last."""
    monkeypatch.chdir(tmp_path)
    args = ["--config", "image", "--config", "trainer/cluster", "--compile=false"]
    args += ["--data.train_samples=250", "--trainer.max_epochs=1", "--test_after_fit=false"]
    args += ["--trainer.limit_val_batches=1", "--data.image_size=16", "--data.patch_size=8"]
    args += ["--trainer.callbacks.every_n_train_steps=2", "--trainer.accelerator=cpu"]
    args += ["--trainer.log_every_n_steps=1"]
    assert cli.main(["fit", *args]) == 0
    saved = Path("runs/image/version_0/checkpoints")
    steps = {path.stem: torch.load(path)["global_step"] for path in saved.iterdir()}
    assert steps == {"best": 3, "last": 3, "step": 2}
