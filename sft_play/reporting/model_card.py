"""The README.md of saved weights: what they are, how to use them, what was measured.

Its text is templates/model_card.md.j2; this module names what is known of the run.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.data.images import image_limits
from sft_play.reporting.base_facts import CAUSAL, BaseFacts
from sft_play.reporting.page import public_name, render
from sft_play.reporting.run_facts import OF_THE_FOLDER, RunFacts, UsedSetting
from sft_play.runs.exports import COMPRESSED, SavedStops

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PLACES = ("model.name", "data.train_path", "data.val_path", "data.test_path")

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes
ROUNDED_FORMATS = {"gguf", *COMPRESSED}  # whose scores are a little other than the run's


def card_text(
    facts: RunFacts,
    config: Config,
    stops: SavedStops,
    weights: Path,
    kind: str | None = None,
    reopened: Sequence[str] = (),
) -> str:
    """Return the text of README.md for the folder `weights`.

    Its `kind` is adapter, model, merged or a format of exports; None is the folder's name.
    `config` may be the run's with another place of the base. `reopened` are lines of what these
    very files said when they were opened again.
    """
    kind = kind or weights.name
    report = facts.report
    delivered = config.train.deliver_as
    image_samples = report.rows("train").get("image_samples", 0)
    reader = "processor" if image_samples else "tokenizer"
    base = BaseFacts.read(config.model)
    card = render(
        "model_card.md.j2",
        facts=facts,
        config=config,
        report=report,
        base=base,
        stops=stops,
        weights=str(weights),
        kind=kind,
        reopened=reopened,
        is_on_hub=HUB_ID.fullmatch(config.model.name),
        model_class=CAUSAL if config.model.trust_remote_code else base.model_class,
        reader=reader,
        image_samples=image_samples,
        image_limits=image_limits(config),
        vllm_rank=next((rank for rank in VLLM_RANKS if rank >= config.tuning.lora.r), None),
        has_these_scores=kind not in ROUNDED_FORMATS if delivered is None else kind == delivered,
        chosen=chosen_settings(facts),
    )
    return card.rstrip() + "\n"


def chosen_settings(facts: RunFacts) -> list[UsedSetting]:
    """Return the settings that a user or a config chose, by name and without private folders."""
    chosen = []
    for setting in sorted(facts.settings, key=attrgetter("name")):
        if setting.is_chosen and setting.name not in OF_THE_FOLDER:
            source, space, rest = setting.origin.partition(" ")
            origin = f"{public_name(source)}{space}{rest}"
            value = public_name(setting.value) if setting.name in PLACES else setting.value
            chosen.append(replace(setting, value=value, origin=origin))
    return chosen
