"""transformers' server for one exported model, under the name of its run.

`transformers serve` lists the models of the Hugging Face cache, and fails if there is none; it
calls a model by its path, and once stopped it waits for the answers that it is generating. This
module runs the same handlers with a manager that has one model.
"""

import argparse
import asyncio
import contextlib
import logging
import time

import uvicorn
from fastapi import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState
from transformers.modeling_utils import PreTrainedModel

SECONDS_TO_STOP = 2  # for answers that are being generated


class OneModel(ModelManager):
    """Load the model of a folder under a name, and no other model."""

    def __init__(self, folder: str, name: str, device: str, attention: str | None):
        self.place = f"{folder}@main"  # a revision, which transformers ignores for a folder
        self.created = int(time.time())
        super().__init__(device, attn_implementation=attention, force_model=name)

    def process_model_name(self, model_id: str) -> str:
        """Return a requested name. Raises: HTTPException for any but the model's."""
        if model_id != self.force_model:
            detail = f"model={model_id!r} is not served here; write {self.force_model!r}"
            raise HTTPException(404, detail)
        return model_id

    def _load_processor(self, model_id: str, **options: object) -> object:
        return super()._load_processor(self.place, **options)

    def _load_model(self, model_id: str, **options: object) -> PreTrainedModel:
        return super()._load_model(self.place, **options)

    def get_gen_models(self) -> list[dict[str, object]]:
        """Return what /v1/models lists."""
        model = {"id": self.force_model, "object": "model", "owned_by": "sft_play"}
        return [{**model, "created": self.created}]


def is_no_cancelled_answer(record: logging.LogRecord) -> bool:
    """Return whether a record is about anything but an answer that Ctrl-C has ended."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def main() -> None:
    """Serve what the command line names until Ctrl-C."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--port", type=int)
    for option in ("--name", "--host", "--device", "--attention"):
        parser.add_argument(option)
    asked = parser.parse_args()
    logging.getLogger("uvicorn.error").addFilter(is_no_cancelled_answer)
    with contextlib.suppress(KeyboardInterrupt):
        models = OneModel(asked.folder, asked.name, asked.device, asked.attention)
        state = GenerationState()
        chat, completion, response = (
            handler(models, state)
            for handler in (ChatCompletionHandler, CompletionHandler, ResponseHandler)
        )
        transcription = TranscriptionHandler(models, state)
        app = build_server(models, chat, completion, response, transcription, state)
        uvicorn.run(
            app,
            host=asked.host,
            port=asked.port,
            timeout_graceful_shutdown=SECONDS_TO_STOP,
        )


if __name__ == "__main__":
    main()
