"""The command `mmpos`: what it answers at once, how settings are layered, what a run ends with."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks import cli, configs

HERE = Path(__file__).parent
JOB = (HERE / "stub_job.yaml").read_text()

# Without torch


def test_help_version_and_configs_import_nothing_heavy(tmp_path):
    program = (
        "import sys; from tasks.cli import main; main([]); main(['--version']); main(['configs']);"
        "main(['fit']); main(['fitt']); main(['fit', '--config', 'imag']);"
        "print([m for m in ('torch', 'lightning', 'timm') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=HERE.parents[1], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_and_version(capsys):
    assert cli.main([]) == cli.main(["--help"]) == cli.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert "mmpos fit --config image" in out and "MMPOS_TRACEBACK=1" in out
    assert out.splitlines()[-1].startswith("mmpos 0.")


def test_configs_are_listed_with_their_first_comment(tmp_path, monkeypatch, capsys):
    (tmp_path / "encoding").mkdir()
    (tmp_path / "image.yaml").write_text("# Pictures.\n# more\na: 1\n")
    (tmp_path / "encoding" / "rope.yaml").write_text("# Turning.\n")
    monkeypatch.setattr(configs, "folder", lambda: tmp_path)
    assert cli.main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["  image          Pictures.", ""]
    assert lines[4] == "  encoding/rope  Turning."


def test_every_shipped_config_has_a_comment_and_resolves_by_name():
    known = configs.shipped()
    assert {"image", "encoding/none", "encoding/rope", "encoding/alibi"} <= set(known)
    for name, path in known.items():
        assert f"  {name} " in configs.table()
        assert configs.resolve(name) == configs.resolve(f"{name}.yaml") == str(path)
        assert path.read_text().startswith("# ")


def test_configs_of_an_installed_wheel(tmp_path, monkeypatch):
    (tmp_path / "mmpos" / "_configs").mkdir(parents=True)
    (tmp_path / "mmpos" / "_configs" / "image.yaml").write_text("# Installed.\n")
    monkeypatch.setattr(configs, "files", lambda _: tmp_path / "mmpos")
    assert configs.resolve("image") == str(tmp_path / "mmpos" / "_configs" / "image.yaml")


def test_a_file_goes_before_a_shipped_config_and_a_folder_does_not(here):
    (here / "image").mkdir()
    assert configs.resolve("image") == str(configs.shipped()["image"])
    (here / "encoding").mkdir()
    (here / "encoding" / "rope").write_text("trainer: {max_epochs: 1}")
    assert configs.resolve("encoding/rope") == "encoding/rope"


@pytest.mark.parametrize("args", [["-c", "image"], ["-c=image"], ["--config=image"], ["-cimage"]])
def test_config_flags(args):
    expected = [str(configs.shipped()["image"])], ["--x", "1"]
    assert configs.split([*args, "--x", "1"]) == configs.split(["--x", "1", *args]) == expected


@pytest.mark.parametrize(
    "args, line",
    [
        (["fitt"], "no command 'fitt'; did you mean fit?"),
        (["--config", "image", "fit"], "a command comes before options such as --config"),
        (["fit"], "mmpos fit needs a job, such as mmpos fit --config image (mmpos configs lists"),
        (["fit", "--trainer.max_epochs", "3"], "mmpos fit needs a job"),
        (["test"], "mmpos test needs a job, such as mmpos test --ckpt_path FILE"),
        (["fit", "--config", "imag"], "no such file or shipped config; did you mean image? (mmpos"),
        (["fit", "-c", "rop"], "did you mean encoding/rope? (mmpos configs lists them)"),
        (["fit", "-c"], "-c needs a file or a name"),
        (["configs", "x"], "mmpos configs takes no arguments, got x"),
    ],
)
def test_mistakes_that_need_no_torch(args, line, run):
    status, told = run.fails(*args)
    assert status == 2 and line in told


# Layers and links


def no_steps(*args):
    return ("fit", *args, "--trainer.max_epochs", "0")


def test_typed_over_config_over_default_whatever_their_order(run):
    built = run(*no_steps("--model.transformer.rotary.base", "7", "-c", "job.yaml"))
    assert built.model.transformer.rotary.base == 7
    assert built.model.transformer.dim == 16
    assert built.model.hparams.lr == 0.25
    assert built.config.fit.seed_everything == 0
    assert built.trainer.max_epochs == 0


def test_later_configs_over_earlier_ones(run):
    built = run(*no_steps("-c", "job.yaml", "--config=turned.yaml"))
    assert built.model.transformer.rotary is None
    assert type(built.model.transformer.bias).__name__ == "Bias"
    assert built.model.transformer.dim == 16


@pytest.mark.parametrize("null", [["=null"], ["", "null"]])
def test_null_can_be_typed(run, null):
    flag = ["--model.transformer.rotary" + null[0], *null[1:]]
    assert run(*no_steps("-c", "job.yaml", *flag)).model.transformer.rotary is None


def test_links(run):
    built = run(*no_steps("-c", "job.yaml", "--data.image_size", "[48,32]"))
    assert built.model.transformer.grid == (12, 8)
    assert built.model.classes == {"class": ["cat", "dog", "owl"]}
    same = run(*no_steps("-c", "job.yaml", "--model.patch_size", "[4,4]"))
    assert same.model.transformer.grid == (8, 8)


@pytest.mark.parametrize("value", ["8", "[8, 8]"])
def test_a_linked_value_is_the_datas(run, value, here):
    line = f"model.patch_size comes from the data: use --data.patch_size {value}"
    assert run.fails("fit", "-c", "job.yaml", "--model.patch_size", value) == (2, line)
    job = yaml.safe_load(JOB)
    job["model"]["init_args"]["patch_size"] = yaml.safe_load(value)
    (here / "job.yaml").write_text(yaml.safe_dump(job))
    assert run.fails("fit", "-c", "job.yaml") == (2, line)


OTHER = ("--data", "stub_jobs.Text", "--trainer.fast_dev_run", "true", "--trainer.logger=false")


def test_data_of_another_kind(run):
    assert type(run("fit", "--model=stub_jobs.Plain", *OTHER).model).__name__ == "Plain"
    built = run("fit", "--model", "stub_jobs.Patchy", "--model.patch_size", "5", *OTHER)
    assert (built.model.patch_size, built.model.channels) == (5, 3)
    status, line = run.fails("fit", "--model", "stub_jobs.Patchy", *OTHER)
    assert status == 1
    assert line == (
        "stub_jobs.Patchy needs patch_size, and Text has no attribute of this name: add one, "
        "or give --model.patch_size"
    )


def test_classes_of_the_current_folder_come_last(here, run, monkeypatch):
    shutil.copy(HERE / "stub_jobs.py", here / "own_jobs.py")
    (here / "yaml.py").write_text("raise RuntimeError('the current folder hides a library')")
    path = [entry for entry in sys.path if entry not in ("", str(here))]
    monkeypatch.setattr(sys, "path", [*path])
    run("fit", "--model", "own_jobs.Plain", *OTHER)
    assert sys.path == [*path, str(here)]


# After fit, and predictions


def test_fit_ends_with_the_test_of_the_best_checkpoint(run, here):
    run("fit", "-c", "job.yaml")
    assert [line.split(maxsplit=1) for line in run.out.splitlines() if line] == [
        ["test/loss", "0.2168"],  # the mean of the numbers, 3 / 8, times the weight, 0.578
        ["test/kind_accuracy", "37.5 %"],
        ["checkpoint", "runs/checkpoints/epoch=0-step=4.ckpt"],
        ["logs", "runs"],
        ["next", "mmpos test --ckpt_path runs/checkpoints/epoch=0-step=4.ckpt"],
    ]
    assert not (here / "lightning_logs").exists()


def test_fit_without_test_or_checkpoint(run):
    run("fit", "-c", "job.yaml", "--test_after_fit", "false")
    assert "test/" not in run.out and "next" in run.out
    run("fit", "-c", "job.yaml", "--trainer.enable_checkpointing", "false")
    assert "test/kind_accuracy  37.5 %" in run.out and "next" not in run.out
    run("fit", "-c", "job.yaml", "--trainer.fast_dev_run", "true")
    assert run.out == ""


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


PLAIN = [
    ["file", "class", "probability"],
    *([f"{i}.png", ["cat", "dog", "owl"][i % 3], f"{i / 8:.6f}"] for i in range(7)),
]


def test_predictions(run, trained, here):
    run("predict", "--ckpt_path", str(trained), "--trainer.enable_progress_bar=false")
    assert rows(here / "predictions.csv") == PLAIN
    assert run.out.splitlines()[-1] == "predictions: predictions.csv"
    two = ("--data.questions", "2", "--predictions", "new/two.csv")
    run("predict", "-c", "job.yaml", *two)
    assert rows(here / "new" / "two.csv")[:3] == [
        ["file", "what", "what_probability", "where", "where_probability"],
        ["0.png", "cat", "0.000000", "l", "0.000000"],
        ["1.png", "dog", "0.125000", "r", "0.125000"],
    ]


def test_predictions_of_two_processes_are_in_order(run, trained, here):
    devices = ("--trainer.strategy", "ddp_fork", "--trainer.devices", "2")
    run("predict", "-c", "job.yaml", f"--ckpt_path={trained}", *devices)
    assert rows(here / "predictions.csv") == PLAIN


def test_two_processes_through_the_command(here):
    args = ["fit", "-c", "job.yaml", "--trainer.strategy", "ddp", "--trainer.devices", "2"]
    shutil.copy(HERE / "stub_jobs.py", here)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mmpos", *args],
        env={
            **__import__("os").environ,
            "PYTHONPATH": str(HERE.parents[1]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test/kind_accuracy") == 1
    assert "mmpos test --ckpt_path runs/checkpoints/epoch=0-step=2.ckpt" in done.stdout
