"""What an installation brings: the command, the configs, and two packages."""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

SCRIPT = Path(sys.executable).with_name("mmpos")


def test_the_command_works_in_an_empty_folder(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "configs"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    root = Path(__file__).parents[1] / "configs"
    assert listed == {str(p.relative_to(root).with_suffix("")) for p in root.rglob("*.yaml")}


def test_no_other_names_are_installed_at_the_top() -> None:
    top = {Path(str(file)).parts[0] for file in distribution("mmpos").files or []}
    own = {name for name in top if not name.startswith(("..", "mmpos-", "_", "__"))}
    assert own <= {"mmpos", "tasks"}
