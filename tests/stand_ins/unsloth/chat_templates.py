"""Stands in for unsloth.chat_templates; the markers of answers are read off the chat template."""

from typing import Any


def get_chat_template(tokenizer: Any, chat_template: str) -> Any:
    return tokenizer


def standardize_sharegpt(dataset: Any) -> Any:
    return dataset


def train_on_responses_only(trainer: Any) -> Any:
    """Take the loss of all tokens but the answers away."""
    tokenizer = trainer.processing_class
    prompt = [{"role": "user", "content": "?"}]
    asked = tokenizer.apply_chat_template(prompt, tokenize=False)
    begun = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    marker = tokenizer(begun[len(asked) :], add_special_tokens=False)["input_ids"]
    assert marker, "the chat template has a generation prompt"

    def mask(row: dict[str, Any]) -> dict[str, Any]:
        ids = row["input_ids"]
        ends = [at + len(marker) for at in range(len(ids)) if ids[at : at + len(marker)] == marker]
        labels = [token if ends and at >= ends[0] else -100 for at, token in enumerate(ids)]
        return {"labels": labels}

    trainer.train_dataset = trainer.train_dataset.map(mask)
    return trainer
