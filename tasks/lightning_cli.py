"""A LightningCLI for any model and data: links, checkpoints as settings, options, callbacks."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import CheckpointIO as LightningCheckpointIO
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import distributed

from tasks import checkpoints, configs, errors, faults, runs, summary
from tasks.base import Task
from tasks.callbacks import FirstBatch, PredictionWriter, RunSettings
from tasks.checkpoint_io import CheckpointIO
from tasks.configs import CommandError, Given
from tasks.errors import LINKED
from tasks.linking import from_data
from tasks.preemption import Preemption
from tasks.progress import Progress

OWN = ("seed_everything", "test_after_fit", "compile", "tensorboard")
"""The command's own settings that a checkpoint records."""


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
        self.environment = runs.Environment()
        self.preemption = Preemption()
        self.kept: list[Path] = []
        callbacks = [first_batch, self.run_settings, self.environment, Progress(), self.preemption]
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=SaveConfigCallback if command == "fit" else None,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"callbacks": callbacks},
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
                compute_fn=from_data(self, name),
                apply_on="instantiate",
            )
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=True,
            help="After fit, test the best checkpoint where the data has test data.",
        )
        parser.add_argument(
            "--compile", type=bool, default=False, help="Compile the network (torch.compile)."
        )
        parser.add_argument(
            "--tensorboard",
            type=bool,
            default=False,
            help="Log for TensorBoard too, in the run's folder (pip install 'mmpos[tensorboard]').",
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
            summary.tell([f"{line}: only what you gave is used"])
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
        own = OWN if self.subcommand == "fit" else OWN[:1]
        self.run_settings.command = {name: self._get(self.config, name) for name in own}
        seed = self.environment.seed = self.run_settings.command["seed_everything"]
        if self.recorded and "seed_everything" in self.recorded.settings:
            was = self.recorded.settings["seed_everything"]
            summary.tell(checkpoints.differences(was, seed, "seed_everything"))
        model = self.config_dump["model"]
        if self.recorded and "model" in self.recorded.settings:
            summary.tell(checkpoints.differences(self.recorded.settings["model"], model))
        elif self.begun:
            summary.tell(checkpoints.differences(self.begun, model.get("init_args", {})))

    def after_instantiate_classes(self) -> None:
        """Says in what the data departs from the data that the checkpoint's model had seen."""
        if self.datamodule.hparams:
            # Not to the logger: it refuses names that model and data record with two values, such
            # as an image size of 32 and of (32, 32). The saved config has them all.
            self.datamodule.save_hyperparameters(dict(self.datamodule.hparams), logger=False)
        if self.recorded and self.subcommand != "predict":
            now = {n: getattr(self.datamodule, n) for n in LINKED if hasattr(self.datamodule, n)}
            summary.tell(checkpoints.differences(self.recorded.linked, now))

        if isinstance(self.model, Task):
            seed = self.environment.seed
            self.model.seed = seed if type(seed) is int else None  # False is none
        if self._get(self.config, "compile"):
            getattr(self.model, "network", self.model).compile()

    def before_fit(self) -> None:
        """Names the encodings and their parameters; keeps metrics that a run's folder has."""
        summary.tell(summary.positions(self.model))
        folders = [each.log_dir for each in self.trainer.loggers if isinstance(each, CSVLogger)]
        if self.trainer.is_global_zero:
            self.kept = [kept for folder in folders if (kept := runs.keep_metrics(folder))]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer, whose checkpoints are `CheckpointIO`'s unless the user gave another; for
        predict with a writer of predictions, unless the user gave one.
        """
        asked = self._get(self.config_init, "trainer").plugins
        plugins = asked if isinstance(asked, list) else [asked] if asked else []
        if not any(isinstance(plugin, LightningCheckpointIO) for plugin in plugins):
            plugins = [*plugins, CheckpointIO()]
        chosen = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)
        if not chosen and not TorchElasticEnvironment.detect() and SLURMEnvironment.detect():
            plugins = [*plugins, SLURMEnvironment(auto_requeue=False)]
            self.preemption.requeue = True  # when all is saved after a step, and at no other time
        kwargs["plugins"] = plugins
        if self.subcommand == "predict":
            asked = self._get(self.config_init, "trainer").callbacks
            asked = asked if isinstance(asked, list) else [asked]
            if not any(isinstance(callback, BasePredictionWriter) for callback in asked):
                self.writer = PredictionWriter(self._get(self.config, "predictions"))
                self.trainer_defaults["callbacks"].append(self.writer)
        trainer = super().instantiate_trainer(**kwargs)
        if self._get(self.config, "tensorboard") and isinstance(trainer.logger, CSVLogger):
            trainer.loggers.append(_beside(trainer.logger))
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        settings = self.config[subcommand]
        begun = settings.ckpt_path or settings.model.get("init_args", Namespace()).get("weights")
        if subcommand != "fit" and not begun:
            summary.tell(["the model is untrained: give --ckpt_path FILE, or --model.weights FILE"])
        try:
            super()._run_subcommand(subcommand)
        except SystemExit as stop:
            error = faults.stopped(stop, self._way_on())
            if error is None:
                raise
            leave_group()
            if not self.trainer.is_global_zero:
                raise SystemExit(error.status) from stop
            raise error from stop
        except Exception as fault:
            error = faults.during(fault, self._way_on()) if self.first_batch.reached else None
            if error is None:
                raise
            if isinstance(fault, FloatingPointError) and not self.trainer.is_global_zero:
                raise SystemExit(error.status) from fault  # the same in all processes
            raise error from fault

    def _way_on(self) -> str:
        """The command that goes on from what a fit saved last; "" where there is none."""
        if self.subcommand != "fit":
            return ""
        saved = self.preemption.saved or checkpoints.newest(self.trainer)
        ended = self.trainer.fit_loop.done and not self.preemption.saved
        return summary.command("test" if ended else "fit", saved) if saved else ""

    def after_predict(self) -> None:
        """Tells where the predictions are."""
        if self.writer and self.trainer.is_global_zero:
            print(f"predictions: {summary.relative(self.writer.path)}")

    def after_fit(self) -> None:
        """Tests the best checkpoint where there is test data, and tells what came of the run."""
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self.trainer.ckpt_path and not self.first_batch.trained:
            for kept in self.kept:
                kept.rename(kept.with_name("metrics.csv"))
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


def leave_group() -> None:
    """Ends what processes are joined by."""
    if distributed.is_initialized():  # else its threads may abort the process as it ends
        distributed.destroy_process_group()


def _beside(logger: CSVLogger) -> TensorBoardLogger:
    """TensorBoard's files in the folder of a CSVLogger."""
    try:
        return TensorBoardLogger(logger.save_dir, logger.name, logger.version)
    except ModuleNotFoundError as error:
        raise ImportError(
            "--tensorboard needs a package that is not here: pip install 'mmpos[tensorboard]'"
        ) from error
