"""An adapter that training continues from: where it is, and the settings that follow from it.

An adapter of a run has them in its stamp, any other in its adapter_config.json. Loads no torch.
"""

from operator import attrgetter
from pathlib import Path

from sft_play.config.layers import Layer, nearest_path
from sft_play.config.schema import Config
from sft_play.config.yaml_source import Located
from sft_play.errors import ConfigError
from sft_play.runs import stamp
from sft_play.runs.adapter_options import why_not_usable
from sft_play.runs.files import Json
from sft_play.runs.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ModelFolder,
    read_adapter_config,
)

SETTING = "model.adapter"
# Settings that make an adapter what it is, and their names in PEFT's config
SHAPE = {
    "model.name": "base_model_name_or_path",
    "model.revision": "revision",
    "tuning.lora.r": "r",
    "tuning.lora.alpha": "lora_alpha",
    "tuning.lora.use_rslora": "use_rslora",
    "tuning.lora.use_dora": "use_dora",
    "tuning.lora.target_modules": "target_modules",
    "tuning.lora.layers_to_transform": "layers_to_transform",
    "tuning.lora.modules_to_save": "modules_to_save",
}
# What a run's stamp has besides. Its chat template is in the adapter's folder.
OF_RUN = "tuning.lora.experts tuning.lora.trainable_tokens model.add_tokens".split()


def find_adapter(named: str, output_dir: Path) -> Path:
    """Return the folder of an adapter, which may be named by its run.

    Raises: ConfigError if there is none, or none as safetensors; CheckpointError if its files
    are not what they were sealed as.
    """
    for folder in (Path(named), Path(named) / "adapter", output_dir / named / "adapter"):
        if not (folder / ADAPTER_CONFIG).is_file():
            continue
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise ConfigError(
                f"{SETTING}={named}: has no {ADAPTER_WEIGHTS}; copy the whole adapter, and save "
                "a pickle (.bin), which can run any code when it is loaded, as safetensors"
            )
        ModelFolder(folder, output_dir, None).refuse_damage()
        return folder
    near = nearest_path(named if "/" in named else output_dir / named)
    meant = f"did you mean {near}? " if near else ""
    raise ConfigError(
        f"{SETTING}={named}: no run with an adapter, and no folder with {ADAPTER_CONFIG}; {meant}"
        "`make runs` lists the runs"
    )


def settings_of_adapter(named: str, output_dir: Path) -> Layer:
    """Return the settings that follow from an adapter, with the adapter's folder itself.

    Raises: as `find_adapter`; ConfigError for one that no settings describe.
    """
    folder = find_adapter(named, output_dir)
    if (folder / stamp.NAME).is_file():
        config = Config.of_run(stamp.read_stamp(folder).config)
        values = {path: attrgetter(path)(config) for path in (*SHAPE, *OF_RUN)}
    else:
        values = _of_config(folder)
    values[SETTING] = str(folder.absolute())
    return {path: Located(value, f"{SETTING}={named}") for path, value in values.items()}


def _of_config(folder: Path) -> Json:
    config = read_adapter_config(folder)
    reason = why_not_usable(config, is_training=True)
    if reason is not None:
        raise ConfigError(f"{SETTING}={folder}: {reason}")
    found = {path: config.get(name) for path, name in SHAPE.items()}
    return {path: value for path, value in found.items() if value is not None}


def refuse_other_base(config: Config) -> None:
    """Raise ConfigError if model.name is not the base that the run's adapter was trained on."""
    folder, base = Path(config.model.adapter or ""), Path(config.model.name)
    if not config.model.adapter or not (folder / stamp.NAME).is_file():
        return
    then = stamp.read_stamp(folder)
    if then.base_digest and base.is_dir() and then.base_digest != stamp.digest_of_model(base):
        raise ConfigError(
            f"{SETTING}={folder}: trained on {then.base_model}, but model.name={base} has "
            f"different weights; set MODEL_NAME={then.base_model}"
        )
