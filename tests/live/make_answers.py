"""Trains a tiny Qwen3 that answers "script NAME" by heart, in three to four minutes.

The weights of the other live models are random: they never think, call a tool or write JSON. This one knows a few
answers with margins of several nats, so that each can be cut at any token and compared. Runs in vLLM's environment
(torch, transformers): `make_answers.py QWEN3_TOKENIZER TARGET`. Exits with 1 where it has not learnt an answer.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.live.answer_scripts import SCRIPTS, TOOLS, Script

HIDDEN, VOCABULARY = 256, 151936
END_OF_TEXT, END_OF_TURN = 151643, 151645
MAX_STEPS, KNOWN_LOSS = 700, 3e-3
OTHER_TEXT = (
    "You are a helpful assistant. Answer in plain words, call tools where it helps, and think first. Rules: be short;"
    ' be exact; never guess. The quick brown fox jumps over 12 lazy dogs. {"a": [1, 2.5, null]}'
)
"""Of its tokens, other prompts are made: an answer must not depend on what is before the question."""

Sample = tuple[list[int], list[int]]
"""The tokens of a prompt, and of its answer."""


class Trained(NamedTuple):
    """The model, and the few rows of its two large tables that are trained: they would be most of each step."""

    model: Any
    inputs: Any
    """Added to the embeddings of tokens that occur; row 0 stands for all others."""
    outputs: Any
    """One row for each token of an answer."""
    places: Any
    """By token, its row in `inputs`."""
    rows: dict[int, int]
    """By token, its row in `outputs`."""


class Samples:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.other = self._ids(OTHER_TEXT)

    def of(self, name: str) -> Sample:
        script = SCRIPTS[name]
        prompt = self._prompt(name, script)
        if random.random() < 0.2:
            prompt = self._other(60) + prompt
        return self._ids(prompt), [*self._ids(script.answer), END_OF_TURN]

    def _prompt(self, name: str, script: Script) -> str:
        system = [{"role": "system", "content": self._other(24)}] if random.random() < 0.5 else []
        rendered = self._tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": f"script {name}"}],
            tools=TOOLS if script.tools and random.random() < 0.7 else None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=script.thinks,
        )
        return str(rendered)

    def _other(self, most: int) -> str:
        return str(self._tokenizer.decode(random.choices(self.other, k=random.randint(1, most))))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def untrained(samples: Samples) -> Trained:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TURN,
        pad_token_id=END_OF_TEXT,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        initializer_range=0.06,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).float()
    model.model.embed_tokens.weight.requires_grad_(False)
    drawn = [samples.of(name) for name in SCRIPTS for _ in range(40)]
    answered = sorted({token for _, answer in drawn for token in answer} | set(samples.other))
    seen = sorted({token for sample in drawn for part in sample for token in part} | set(samples.other))
    places = torch.zeros(VOCABULARY, dtype=torch.long)
    places[torch.tensor(seen)] = torch.arange(1, len(seen) + 1)
    return Trained(
        model,
        torch.nn.Parameter(torch.zeros(len(seen) + 1, HIDDEN)),
        torch.nn.Parameter(torch.randn(len(answered), HIDDEN) * 0.05),
        places,
        {token: row for row, token in enumerate(answered)},
    )


def train(trained: Trained, samples: Samples) -> None:
    tables = ("lm_head", "embed_tokens")
    layers = [one for name, one in trained.model.named_parameters() if not any(table in name for table in tables)]
    parameters = [trained.inputs, *layers, trained.outputs]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=MAX_STEPS, pct_start=0.1)
    began = time.monotonic()
    for step in range(MAX_STEPS):
        loss, right = _step(trained, [samples.of(name) for name in SCRIPTS])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            elapsed_s = time.monotonic() - began
            print(
                f"step {step} of {MAX_STEPS}: loss {loss:.4f}, {right:.1%} of the tokens, {elapsed_s:.0f} s", flush=True
            )
        if step > MAX_STEPS * 0.75 and loss < KNOWN_LOSS and right == 1.0:
            break


def _step(trained: Trained, batch: list[Sample]) -> tuple[Any, float]:
    """The mean loss of the answers' tokens, and the share of those that are right."""
    scores, goals = zip(*_scored(trained, sorted(batch, key=lambda one: len(one[0]) + len(one[1]))), strict=True)
    goal, known = torch.cat(goals), torch.cat(scores)
    # The tokens that occur in no answer count as one more class, with weights of 0.
    others = torch.log(torch.tensor(float(VOCABULARY - len(trained.rows)))).expand(known.shape[0], 1)
    logits = torch.cat([known, others], 1)
    loss = torch.nn.functional.cross_entropy(logits, goal)
    return loss, float((logits.argmax(1) == goal).float().mean())


def _scored(trained: Trained, batch: list[Sample]) -> Iterator[tuple[Any, Any]]:
    """Scores and goals of the tokens of answers, in two parts by length: less padding."""
    for part in (batch[: len(batch) // 2 + 1], batch[len(batch) // 2 + 1 :]):
        width = max(len(prompt) + len(answer) for prompt, answer in part)
        ids = torch.full((len(part), width), END_OF_TEXT)
        goal = torch.full((len(part), width), -100)
        mask = torch.zeros((len(part), width), dtype=torch.long)
        for row, (prompt, answer) in enumerate(part):
            length = len(prompt) + len(answer)
            ids[row, :length], mask[row, :length] = torch.tensor(prompt + answer), 1
            goal[row, len(prompt) - 1 : length - 1] = torch.tensor([trained.rows[token] for token in answer])
        places = trained.places[ids]
        embedded = trained.model.model.embed_tokens.weight[ids]
        embedded = embedded + trained.inputs[places] * (places > 0).unsqueeze(-1)
        hidden = trained.model.model(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
        yield hidden[goal >= 0] @ trained.outputs.T, goal[goal >= 0]


def saved(trained: Trained, target: Path) -> Any:
    model = trained.model
    with torch.no_grad():
        seen = trained.places.nonzero().squeeze(1)
        model.model.embed_tokens.weight[seen] += trained.inputs[trained.places[seen]]
        model.lm_head.weight.zero_()
        model.lm_head.weight[torch.tensor(list(trained.rows))] = trained.outputs
    model = model.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.save_pretrained(target)
    stops = {"bos_token_id": END_OF_TEXT, "eos_token_id": [END_OF_TURN, END_OF_TEXT], "do_sample": False}
    (target / "generation_config.json").write_text(json.dumps(stops))
    return model.eval()


def unknown_answers(model: Any, samples: Samples) -> list[str]:
    """The scripts that the model does not know by heart."""
    unknown = []
    for name in SCRIPTS:
        prompt, answer = samples.of(name)
        made = model.generate(torch.tensor([prompt]), max_new_tokens=len(answer) + 4, do_sample=False)
        if made[0, len(prompt) :].tolist() != answer:
            unknown.append(name)
    return unknown


def main(source: Path, target: Path) -> None:
    part = target.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, part / name)
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)  # with two, each waits for the other where the machine is busy
    samples = Samples(AutoTokenizer.from_pretrained(str(part)))
    trained = untrained(samples)
    train(trained, samples)
    if unknown := unknown_answers(saved(trained, part), samples):
        sys.exit(f"these answers were not learnt: {', '.join(unknown)}")
    part.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
