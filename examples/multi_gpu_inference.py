"""Answers to a file of questions on several GPUs: every process answers a share of them.

torchrun --nproc_per_node=2 examples/multi_gpu_inference.py --rows data/desk/test.jsonl
python examples/multi_gpu_inference.py --rows data/desk/test.jsonl --model multi_gpu_output

The model may be a folder with an adapter. The answers are in the order of the rows, and do not
depend on the number of processes: batches are cut before they are dealt out. They go to
results.json in --output-dir.
"""

import json
from itertools import chain

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from example_setup import Setup, read_setup
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sft_play.distributed import choose_device_map, choose_dtype, print_main

BATCH_SIZE = 8
MAX_NEW_TOKENS = 64


def main() -> None:
    """Answer the rows, and write the answers."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    setup = read_setup(__doc__, "multi_gpu_inference_output")
    tokenizer = setup.tokenizer()
    tokenizer.padding_side = "left"  # an answer begins where its prompt ends
    model = AutoModelForCausalLM.from_pretrained(
        setup.model_name, dtype=choose_dtype(), device_map=choose_device_map()
    ).eval()

    prompts = [question_of(row["messages"], tokenizer) for row in setup.rows()]
    batches = [prompts[start : start + BATCH_SIZE] for start in range(0, len(prompts), BATCH_SIZE)]
    own = range(accelerator.process_index, len(batches), accelerator.num_processes)
    answers = {number: answer(batches[number], model, tokenizer) for number in own}

    shares = dict(chain.from_iterable(share.items() for share in gather_object([answers])))
    in_order = list(chain.from_iterable(shares[number] for number in range(len(batches))))
    if accelerator.is_main_process:
        write(setup, prompts, in_order)
    print_main(f"{len(in_order)} answers of {accelerator.num_processes} processes")
    accelerator.end_training()


def question_of(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the conversation up to its last answer, as the model's template writes it."""
    return tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)


@torch.inference_mode()
def answer(
    prompts: list[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Return the answer to each prompt of a batch."""
    device = model.get_input_embeddings().weight.device  # also of a model that is split
    batch = tokenizer(prompts, padding=True, return_tensors="pt").to(device)
    ids = model.generate(
        **batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def write(setup: Setup, prompts: list[str], answers: list[str]) -> None:
    """Write results.json: a prompt and an answer for each row."""
    rows = [
        {"prompt": prompt, "answer": text} for prompt, text in zip(prompts, answers, strict=True)
    ]
    setup.output_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
    (setup.output_dir / "results.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
