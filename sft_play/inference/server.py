"""transformers' server for one exported model, under the name of its run.

`transformers serve` lists the models of the Hugging Face cache, and fails if there is none. It
uses a model's path as its name, and after a stop it waits for answers in progress. This
module runs the same handlers with a manager that has one model.

    python -m sft_play.inference.server <folder> <name> <device> <host> <port> [<attention>]
"""

import contextlib
import logging
import sys
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

SECONDS_TO_STOP = 2  # for answers in progress


class OneModel(ModelManager):
    """Load the model of a folder under a name, and no other model."""

    def __init__(self, folder: str, name: str, device: str, attention: str | None):
        self.place = f"{folder}@main"  # a revision, which transformers ignores for a folder
        super().__init__(device, attn_implementation=attention, force_model=name)

    def process_model_name(self, model_id: str) -> str:
        """Return a requested name. Raises: HTTPException unless it is the model's."""
        if model_id != self.force_model:
            detail = f"model={model_id!r} is not served here; write {self.force_model!r}"
            raise HTTPException(404, detail)
        return model_id

    def _load_processor(self, model_id: str, **options: object) -> object:
        return super()._load_processor(self.place, **options)

    def _load_model(self, model_id: str, **options: object) -> object:
        return super()._load_model(self.place, **options)

    def get_gen_models(self) -> list[dict[str, object]]:
        """Return the content of /v1/models."""
        now = int(time.time())
        return [{"id": self.force_model, "object": "model", "created": now, "owned_by": "sft_play"}]


def main(
    folder: str, name: str, device: str, host: str, port: str, attention: str | None = None
) -> None:
    """Serve a folder until Ctrl-C."""
    # no traceback of an answer that Ctrl-C has ended
    errors = logging.getLogger("uvicorn.error")
    errors.addFilter(lambda record: "CancelledError" not in str(record.exc_info))
    with contextlib.suppress(KeyboardInterrupt):
        models = OneModel(folder, name, device, attention)
        state = GenerationState()
        app = build_server(
            models,
            ChatCompletionHandler(models, state),
            CompletionHandler(models, state),
            ResponseHandler(models, state),
            TranscriptionHandler(models, state),
            state,
        )
        uvicorn.run(app, host=host, port=int(port), timeout_graceful_shutdown=SECONDS_TO_STOP)


if __name__ == "__main__":
    main(*sys.argv[1:])
