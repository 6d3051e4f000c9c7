"""The parts of the build that pyproject.toml cannot express: files and dependencies.

Dependencies are those of requirements*.txt. The configs, scripts, base model and rows go to
sft_play/_project, where sft_play.config.loader finds them. A wheel is built in a temporary folder,
so no older file gets into it.
"""

import re
import tempfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PROJECT = "sft_play._project"
ROOT = Path(__file__).resolve().parent
FOLDERS = ("configs", "scripts", "data/desk", "data/gsm8k", "data/tiny_llama")
REQUIREMENTS = sorted(path.name for path in ROOT.glob("requirements*.txt"))
# Pinned by make install. Here a range: GPU images bring an older torch (sft_play.monitor.packages),
# and other programs of an environment cap the others.
RANGES = {
    "torch": "torch>=2.11,<2.14",
    "compressed-tensors": "compressed-tensors>=0.19,<0.21",
    "nvidia-ml-py": "nvidia-ml-py>=13.595",
    "pillow": "pillow>=12,<14",
}


def read_requirements(name: str, heading: str = "# work on SFT-Play itself") -> list[str]:
    """Return the packages of a requirements file, without those below `heading`."""
    text = (ROOT / name).read_text(encoding="utf-8").partition(heading)[0]
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    packages = [line for line in lines if line and not line.startswith("-")]
    return [RANGES.get(re.split(r"[<=>]", package)[0], package) for package in packages]


class BuildWithoutSetup(build_py):
    """Build the package without setup.py, which is in the folder of the requirements files."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return the modules of a package; those of the project's root are none."""
        if package == PROJECT:
            return []
        return super().find_package_modules(package, package_dir)


def main() -> None:
    project = {f"{PROJECT}.{name.replace('/', '.')}": name for name in FOLDERS}
    with tempfile.TemporaryDirectory() as folder:
        setup(
            packages=[
                *find_packages(include=["sft_play*", "sft_kernels*", "notebook_converter"]),
                PROJECT,
                *project,
            ],
            package_dir={PROJECT: ".", **project},
            package_data={
                "sft_play": ["*/*.json", "data/*.toml", "reporting/templates/*"],
                PROJECT: REQUIREMENTS,
                **{name: ["*"] for name in project},
            },
            include_package_data=False,
            install_requires=[RANGES["torch"], *read_requirements("requirements.txt")],
            extras_require={
                extra: read_requirements(f"requirements-{extra}.txt")
                for extra in ("bench", "gguf", "unsloth")
            },
            cmdclass={"build_py": BuildWithoutSetup},
            options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}},
        )


if __name__ == "__main__":
    main()
