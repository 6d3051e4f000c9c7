"""What is written beside saved weights: where answers end, a stretched rope, a README.md."""

from pathlib import Path

from sft_play.config.schema import Config
from sft_play.models.base_parts import copy_processors, keep_untrained, write_config
from sft_play.models.export import saved_stops, stops_of, trained_stops, write_stops
from sft_play.models.load import weight_dtype
from sft_play.models.rope import write_rope_beside_adapter
from sft_play.reporting.card_facts import CardFacts
from sft_play.reporting.model_card import card_text
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport
from sft_play.training.trainer import SftTrainer


def describe_weights(
    staged: Path, weights: Path, config: Config, trainer: SftTrainer, report: RunReport
) -> None:
    """Write it into the folder `staged`, which will be `weights`, for programs and people."""
    tokenizer = trainer.processing_class
    own = stops_of(trainer.model)
    stops = trained_stops(trainer.train_dataset.samples, tokenizer, own)
    if config.tuning.mode == "full":
        dtype = weight_dtype(config, trainer.process.compute_dtype)
        write_config(config, trainer.model, staged, dtype, unties=False)
        keep_untrained(config, trainer.model, staged)
    copy_processors(config, staged)
    write_stops(staged, stops, tokenizer, trainer.model)
    write_rope_beside_adapter(config, trainer.model.config, staged)
    facts = CardFacts.of(RunFolder(weights.parent), config, report)
    card = card_text(config, report, saved_stops(stops, tokenizer), weights, facts)
    write_text(staged / "README.md", card)
