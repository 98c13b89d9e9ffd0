"""The command `mmpos`: answers what it can at once, and imports Lightning only to run a job."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from tasks import configs
from tasks.configs import CommandError

RUNS = ("fit", "validate", "test", "predict")
COMMANDS = (*RUNS, "export", "configs")

HELP = """\
usage: mmpos COMMAND [options]

  mmpos configs                                        list the shipped configs
  mmpos fit --config image --config encoding/rope      train, then test the best checkpoint
  mmpos validate --ckpt_path FILE                      measure on the validation data
  mmpos test --ckpt_path FILE                          measure on the test data
  mmpos predict --ckpt_path FILE --data.predict_folder DIR    write predictions.csv
  mmpos export --ckpt_path FILE --output model.onnx    or .safetensors, .pth: the model alone

A --config is a file, or a shipped config by its name; later ones are laid over earlier ones.
Any setting can be typed: --trainer.max_epochs 3 --model.lr 0.001 --data.image_size 64
What is typed wins over config files, and these win over what a checkpoint recorded.

  --ckpt_path FILE        go on with a run: weights, optimiser, step, and its settings
  --ckpt_path last        … with the newest whole checkpoint of the job's runs
  --model.weights FILE    a new run that begins with these weights
  --config trainer/ddp    on all devices; trainer/fsdp: the model in parts among them
  --compile true          compile the network;  --tensorboard true: log for TensorBoard too
  --print_config          show the settings of the job and stop
  mmpos fit --help        every option of Lightning's trainer
  mmpos fit --model.help tasks.ImageClassification     the options of a class

MMPOS_TRACEBACK=1 in the environment shows where an error was raised.
mmpos --version shows the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with ``argv`` (default: the process's arguments); gives the exit status.

    A user's mistake is one line on stderr: status 2 if it is in the arguments or a config file,
    else 1, or a shell's for a signal that stopped the run. What is raised after the first batch
    keeps its traceback.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except KeyboardInterrupt:
        return 130
    except CommandError as error:
        if os.environ.get("MMPOS_TRACEBACK") == "1":
            traceback.print_exc()
        sys.stderr.write(f"mmpos: error: {error}\n")  # at once: processes share the stream
        return error.status


def _dispatch(args: list[str]) -> int:
    command = args[0] if args else "--help"
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
    elif command == "--version":
        from mmpos._version import __version__

        print(f"mmpos {__version__}")
    elif command == "configs":
        if args[1:]:
            raise CommandError(f"mmpos configs takes no arguments, got {args[1]}", 2)
        print(configs.table())
    elif command == "export":
        _export(args[1:])
    elif command in RUNS:
        _run(command, args[1:])
    elif command.startswith("-"):
        raise CommandError(
            f"a command comes before options such as {command}: one of {', '.join(COMMANDS)}", 2
        )
    else:
        near = configs.did_you_mean(command, COMMANDS)
        raise CommandError(f"no command {command!r}{near} (one of {', '.join(COMMANDS)})", 2)
    return 0


def _run(command: str, args: list[str]) -> None:
    files, others = configs.split(args)
    if not files and not any(_names_a_job(arg) for arg in others):
        whole = "--config image" if command == "fit" else "--ckpt_path FILE"
        raise CommandError(
            f"mmpos {command} needs a job, such as mmpos {command} {whole} "
            "(mmpos configs lists the shipped ones)",
            2,
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a user's own classes can be named in a config
    # Threads that wait for work by spinning cost five times the work itself on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tasks import command as lightning

    lightning.run(command, files, others)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{self.prog}: {message}", 2)


def _export(args: list[str]) -> None:
    parser = _Parser(prog="mmpos export", allow_abbrev=False)
    parser.add_argument("--ckpt_path", metavar="FILE", required=True, help="of an image task")
    parser.add_argument(
        "--output",
        metavar="FILE",
        required=True,
        help="what to write; .safetensors, .pth or .onnx names the form",
    )
    given = parser.parse_args(args)
    if given.ckpt_path == "last":
        from tasks import runs

        given.ckpt_path = runs.last([], lambda line: print(line, file=sys.stderr)) or "last"
    from tasks.export import export

    for line in export(given.ckpt_path, given.output):
        print(line)


def _names_a_job(arg: str) -> bool:
    flag = arg.partition("=")[0]
    jobs = ("--model", "--model.class_path", "--model.help", "--ckpt_path", "--help", "-h")
    return flag in jobs or flag.endswith(".help")
