"""A notebook for one GPU becomes one for several: every edit of every cell. Pure."""

from collections import defaultdict
from dataclasses import dataclass

from sft_play.notebooks import code as codes
from sft_play.notebooks.banner import banner_edits
from sft_play.notebooks.code import Code, Edit
from sft_play.notebooks.document import Document
from sft_play.notebooks.inference import device_edits
from sft_play.notebooks.load_call import device_map_edits
from sft_play.notebooks.memory_stats import statistics_edits
from sft_play.notebooks.notes import Note, look
from sft_play.notebooks.own_devices import notes_of_devices
from sft_play.notebooks.recognise import Kind, Notebook

# What a person must know of each kind, None where nothing is special
OF_KIND = {
    Kind.TEXT: None,
    Kind.VISION: "trains on images: the load, memory and device are converted; try it on a few "
    "rows first, because the vision tower and the language model are split as one",
    Kind.AUDIO: "trains on sound: the load, memory and device are converted; codecs that the "
    "notebook loads beside the model stay on the GPU that it names",
    Kind.REWARDS: "trains by reinforcement learning: generation with vLLM (fast_inference=True) is "
    "not split",
    Kind.PREFERENCES: "trains on preferences: a reference model, where there is one, needs a "
    "device map of its own",
    Kind.EMBEDDINGS: "trains an embedding model, which is small and takes no device_map: train it "
    "data-parallel with torchrun instead",
    Kind.OTHER: "trains by a trainer that is not TRL's SFTTrainer; read the converted cells",
    Kind.INFERENCE: "has no trainer: the model is split for inference alone",
    Kind.NOTHING: "loads no model with Unsloth's FastLanguageModel, FastModel or FastVisionModel: "
    "nothing to convert",
}
RELEVANT = ("from_pretrained", "get_device_properties", "max_memory_reserved", '"cuda"', "'cuda'")
TRAINS = ("SFTTrainer", ".train(")


@dataclass(frozen=True)
class Conversion:
    """The text of a converted notebook, and what was done."""

    text: str
    notes: tuple[Note, ...]
    changed_cells: frozenset[int]


def convert(document: Document) -> Conversion:
    """Return the notebook converted for several GPUs; converting that again changes nothing."""
    notebook = Notebook(document)
    edits, notes = all_edits(notebook)
    sources = {
        code.number: codes.apply(code.source, edits[code.number])
        for code in notebook.parsed
        if edits.get(code.number)
    }
    text = document.with_sources(sources) if sources else document.text
    notes = [*(look(None, problem) for problem in document.problems), *notes]
    return Conversion(text, tuple(notes), frozenset(sources))


def all_edits(notebook: Notebook) -> tuple[dict[int, list[Edit]], list[Note]]:
    """Return the edits of every cell by its number, and the notes of the report."""
    notes = [*of_kind(notebook), *unread_cells(notebook)]
    if notebook.kind in (Kind.NOTHING, Kind.EMBEDDINGS):
        return {}, notes
    notes += notes_of_devices(notebook)
    edits: defaultdict[int, list[Edit]] = defaultdict(list)
    for load in notebook.training_loads:
        made, said = device_map_edits(load)
        edits[load.number] += made
        notes += said
    notes += _later_loads(notebook)
    for made_by_cell, said in (statistics_edits(notebook), banner_edits(notebook)):
        for number, made in made_by_cell.items():
            edits[number] += made
        notes += said
    for code in notebook.parsed:
        made, said = device_edits(notebook, code)
        edits[code.number] += made
        notes += said
    return edits, notes


def of_kind(notebook: Notebook) -> list[Note]:
    """Return what a person must know of a notebook of this kind."""
    sentence = OF_KIND[notebook.kind]
    return [] if sentence is None else [look(None, sentence)]


def unread_cells(notebook: Notebook) -> list[Note]:
    """Return a note for each code cell that cannot be read and may matter."""
    notes = []
    for code in notebook.codes:
        if code.tree is None and _may_matter(code):
            said = f"left as it is, because it is not read as Python ({code.problem})"
            notes.append(look(code.number, said))
        elif code.masked and (words := _words_in_magics(code)):
            said = f"a magic line with {', '.join(words)} is left as it is"
            notes.append(look(code.number, said))
    return notes


def _may_matter(code: Code) -> bool:
    return any(word in code.source for word in (*RELEVANT, *TRAINS))


def _words_in_magics(code: Code) -> list[str]:
    """Return what matters in lines that are no Python, such as `%time trainer.train()`."""
    lines = codes.LINE.findall(code.source)
    masked = "".join(lines[number - 1] for number in code.masked)
    return [word for word in (*RELEVANT, *TRAINS) if word in masked]


def _later_loads(notebook: Notebook) -> list[Note]:
    later = [load for load in notebook.loads if load not in notebook.training_loads]
    return [
        look(load.number, "loads a model after training, for inference; left as it is")
        for load in later
        if load.keyword("device_map") is None
    ]
