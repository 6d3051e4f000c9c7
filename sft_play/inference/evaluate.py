"""Score the weights of a finished run on its test rows again."""

from sft_play.data.assemble import RunData, assemble
from sft_play.data.data_facts import DataFacts
from sft_play.data.pipeline import build_run_data
from sft_play.errors import DataError
from sft_play.evaluation.evaluator import Evaluator
from sft_play.inference.load import TrainedModel, load_run
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder


def evaluate_run(folder: RunFolder, device: str) -> list[str]:
    """Score a run's weights on its test rows and write eval/again.json.

    Returns the lines to print.
    """
    trained = load_run(folder, device)
    test = prepared_data(folder, trained).test
    evaluator = Evaluator(
        test,
        trained.tokenizer,
        trained.config.train,
        trained.process,
        saved_stops=trained.stops,
    )
    scores = evaluator.score(trained.model)
    write_json(folder.evaluation / "again.json", scores.as_metrics())
    return [f"{folder.name} {scores.as_text()} rows={len(test)}"]


def prepared_data(folder: RunFolder, trained: TrainedModel) -> RunData:
    """Return a run's data from its tokenized samples, or from the files if those are gone."""
    try:
        facts = DataFacts.from_json(folder.read_data())
        return assemble(trained.config, facts.sources)
    except DataError:
        return build_run_data(trained.config, trained.tokenizer)
