"""``mmpos fit``, ``validate``, ``test`` and ``predict``: a LightningCLI."""

import inspect
import logging
import sys
import warnings
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pkgutil import resolve_name
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import distributed

from mmpos.interop.timm.backbone import blank
from tasks import checkpoints, configs, errors, summary
from tasks.callbacks import FirstBatch, PredictionWriter, RunSettings
from tasks.configs import CommandError, Given
from tasks.errors import LINKED


def run(command: str, files: list[str], others: list[str]) -> None:
    """Runs a sub-command on config files, in order, with typed arguments laid over them.

    Raises: CommandError for a user's mistake; what fails after the first batch is left as it is.
    """
    _silence(command)
    given = [setting for file in files for setting in configs.read(file)]
    given += configs.typed(others)
    configs.check_sections(given)
    recorded = None
    asked = configs.last("ckpt_path", given)
    path = asked.value if asked and asked.value != "null" else ""
    trusted = configs.last("weights_only", given)  # then Python objects may stand in for settings
    if checkpoints.is_file(path) and not (trusted and trusted.value.lower() == "false"):
        recorded = checkpoints.recorded(path, LINKED, trainer=command == "fit")
        given = [*configs.settings(recorded.text, f"recorded in {path}"), *given]
    weights = configs.find("model.weights", given)
    architecture = checkpoints.architecture(weights.value) if weights and not path else ""
    first_batch = FirstBatch()
    try:
        args = [f"--config={file}" for file in files] + others
        with blank() if path else nullcontext():  # a checkpoint has the weights of its backbone
            Command(command, args, given, recorded, architecture, first_batch)
        if distributed.is_initialized():  # else its threads may abort the process as it ends
            distributed.destroy_process_group()
    except errors.ParseError as error:
        raise CommandError(errors.describe(error, given, command, others), 2) from error
    except Exception as error:
        mistake = errors.data(error) if first_batch.reached else errors.early(error, given)
        if mistake is None or mistake is error:
            raise
        if not path and not architecture and "argument: 'transformer'" in str(mistake):
            reason = (
                f"{mistake}, since {weights.value} is missing or records no settings"
                if weights
                else f"{mistake}: give one, or --model.weights FILE to go on from a checkpoint's"
            )
            mistake = CommandError(reason, 2)
        raise mistake from error


def _silence(command: str) -> None:
    """Leaves out advertisements, and warnings that a user of the command can do nothing about."""
    for name in ("pytorch.utilities.rank_zero", "fabric.utilities.seed"):
        logging.getLogger(f"lightning.{name}").addFilter(_tells_something)
    warnings.filterwarnings("ignore", ".*there is no last checkpoint available")  # our own error
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    if command != "fit":  # which asks the checkpoint for weights only
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks used")
        warnings.filterwarnings("ignore", "The dirpath has changed from")


def _tells_something(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "💡 Tip" not in message and "Seed set to" not in message


class Command(LightningCLI):
    """LightningCLI with any model and data class, links from data to model, and checkpoints that
    fill in what was not given.

    What is in `tasks.errors.LINKED`, such as the data's ``classes``, becomes the model's parameters
    of these names, as far as the data has and the model takes them.
    """

    def __init__(
        self,
        command: str,
        args: list[str],
        given: list[Given],
        recorded: checkpoints.Recorded | None,
        architecture: str,
        first_batch: FirstBatch,
    ) -> None:
        self.given = given
        self.recorded = recorded
        self.first_batch = first_batch
        self.begun = yaml.safe_load(architecture)["model"]["init_args"] if architecture else {}
        self.lowest = recorded.text if recorded else architecture
        self.writer: PredictionWriter | None = None
        self.run_settings = RunSettings()
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=SaveConfigCallback if command == "fit" else None,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"callbacks": [first_batch, self.run_settings]},
            parser_class=errors.Parser,
            parser_kwargs={"prog": "mmpos", "allow_abbrev": False},
            args=[command, *args],
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the links and the command's own options."""
        for name in LINKED:
            parser.link_arguments(
                "data",
                f"model.init_args.{name}",
                compute_fn=self._linked(name),
                apply_on="instantiate",
            )
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=True,
            help="After fit, test the best checkpoint where the data has test data.",
        )

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand != "fit":  # its numbers go to the screen or a file of their own
            parser.set_defaults({"trainer.logger": False})
        if subcommand == "predict":
            parser.add_argument(
                "--predictions", type=str, default="predictions.csv", help="CSV file to write."
            )
        return parser

    def _linked(self, name: str) -> Any:
        """A link's function: from the datamodule to what the model gets as ``name``."""

        def from_data(data: LightningDataModule) -> Any:
            model = self._get(self.config, "model")
            init_args = model.get("init_args", Namespace())
            asked = init_args.get(name)
            typed = configs.last(f"model.{name}", self.given) is not None
            recorded = self.recorded.linked if self.recorded else {}
            if not hasattr(type(data), name) and not hasattr(data, name):
                if name in recorded and not typed:  # of a model whose data does not give it
                    return recorded[name]
                if name in init_args and not typed and _required(model.class_path, name):
                    raise CommandError(
                        f"{model.class_path} needs {name}, and {type(data).__name__} has no "
                        f"attribute of this name: add one, or give --model.{name}"
                    )
                return asked
            if self.subcommand == "predict" and name in recorded:
                value = recorded[name]  # what was trained on need not be at hand
            else:
                value = getattr(data, name)
            if typed and _tuples(asked) != _tuples(value):
                raise CommandError(errors.from_data(name, asked), 2)
            return value

        return from_data

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses ``args`` over what a checkpoint recorded: that of the run to go on with, or the
        transformer whose weights a new run begins with.
        """
        command, *rest = args
        layer = [f"--config={self.lowest}"] if self.lowest else []
        try:
            self.config = parser.parse_args([command, *layer, *rest])
        except errors.ParseError as error:
            if layer:  # settings of another version do not stand in the way of a whole job
                with suppress(errors.ParseError):
                    self.config = parser.parse_args(args)
            if not hasattr(self, "config"):
                raise
            self.recorded = None
            line = errors.describe(error, self.given, command, rest)
            self._tell([f"{line}: only what you gave is used"])
        settings = self.config[command]
        self._check_sections(vars(settings))
        errors.refuse_nulls(settings, self._parser(command), self.given)
        if self.recorded:
            self._leave_out_weights(settings.model.get("init_args", Namespace()))

    def _check_sections(self, known: dict[str, Any]) -> None:
        for setting in self.given:
            section = setting.path.partition(".")[0]
            if setting.where and section not in known:
                near = configs.did_you_mean(section, known)
                raise CommandError(f"{section} ({setting.where}): no such setting{near}", 2)

    def _leave_out_weights(self, init_args: Namespace) -> None:
        weights = configs.last("model.weights", self.given)
        if weights and not weights.where and weights.value != "null":
            raise CommandError(
                "--model.weights begins a new run and --ckpt_path goes on with one: give one", 2
            )
        if init_args.get("weights"):
            init_args["weights"] = None  # a saved config that is resumed from a checkpoint

    def _parse_ckpt_path(self) -> None:
        """Does nothing: a checkpoint's settings are the lowest layer already, not the highest."""

    def before_instantiate_classes(self) -> None:
        """Says in what the settings depart from the checkpoint's, and keeps the trainer's."""
        self._dump_config()
        self.run_settings.trainer = self.config_dump["trainer"]
        self.run_settings.ckpt_path = self._get(self.config, "ckpt_path")
        model = self.config_dump["model"]
        if self.recorded and "model" in self.recorded.settings:
            self._tell(checkpoints.differences(self.recorded.settings["model"], model))
        elif self.begun:
            self._tell(checkpoints.differences(self.begun, model.get("init_args", {})))

    def after_instantiate_classes(self) -> None:
        """Says in what the data departs from the data that the checkpoint's model had seen."""
        if self.datamodule.hparams:
            # Not to the logger: it refuses names that model and data record with two values, such
            # as an image size of 32 and of (32, 32). The saved config has them all.
            self.datamodule.save_hyperparameters(dict(self.datamodule.hparams), logger=False)
        if self.recorded and self.subcommand != "predict":
            now = {n: getattr(self.datamodule, n) for n in LINKED if hasattr(self.datamodule, n)}
            self._tell(checkpoints.differences(self.recorded.linked, now))

    @rank_zero_only
    def _tell(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(line, file=sys.stderr)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer; for predict with a writer of predictions, unless the user gave one."""
        if self.subcommand == "predict":
            asked = self._get(self.config_init, "trainer").callbacks
            asked = asked if isinstance(asked, list) else [asked]
            if not any(isinstance(callback, BasePredictionWriter) for callback in asked):
                self.writer = PredictionWriter(self._get(self.config, "predictions"))
                self.trainer_defaults["callbacks"].append(self.writer)
        return super().instantiate_trainer(**kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        settings = self.config[subcommand]
        begun = settings.ckpt_path or settings.model.get("init_args", Namespace()).get("weights")
        if subcommand != "fit" and not begun:
            self._tell(["the model is untrained: give --ckpt_path FILE, or --model.weights FILE"])
        try:
            super()._run_subcommand(subcommand)
        except SystemExit as stop:
            saved = checkpoints.newest(self.trainer) if subcommand == "fit" else ""
            error = errors.stopped(stop, summary.command("fit", saved) if saved else "")
            if error is None:
                raise
            if not self.trainer.is_global_zero:
                raise SystemExit(error.status) from stop
            raise error from stop

    def after_predict(self) -> None:
        """Tells where the predictions are."""
        if self.writer and self.trainer.is_global_zero:
            print(f"predictions: {summary.relative(self.writer.path)}")

    def after_fit(self) -> None:
        """Tests the best checkpoint where there is test data, and tells what came of the run."""
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self.trainer.ckpt_path and not self.first_batch.trained:
            raise CommandError(
                f"nothing was trained: the run of {self.trainer.ckpt_path} had come to its end; "
                f"to go on raise --trainer.max_epochs (now {self.trainer.max_epochs})"
            )
        log_dir = self.trainer.log_dir  # a collective call: for all processes
        best = checkpoints.best(self.trainer)
        metrics: dict[str, float] = {}
        if (
            self._get(self.config, "test_after_fit")
            and is_overridden("test_dataloader", self.datamodule, LightningDataModule)
            and is_overridden("test_step", self.model, LightningModule)
        ):
            results = self.trainer.test(
                self.model,
                datamodule=self.datamodule,
                ckpt_path=best or None,
                verbose=False,
            )
            metrics = {k: v for result in results for k, v in result.items()}
        if self.trainer.is_global_zero:
            summary.print_fit(metrics, best, log_dir)


def _required(class_path: str, name: str) -> bool:
    parameters = inspect.signature(resolve_name(class_path)).parameters
    return name in parameters and parameters[name].default is inspect.Parameter.empty


def _tuples(value: Any) -> Any:
    value = value.as_dict() if isinstance(value, Namespace) else value
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
