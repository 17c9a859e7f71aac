"""A training that can stop and go on: folders, lessons, time, log and records around a `Trainer`."""

from __future__ import annotations

import json
import math
import platform
import shutil
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from a3b_engine.checkpoint.write import write_json
from a3b_engine.config import ModelConfig
from a3b_engine.tokenizer import Tokenizer
from tools.demo_model.make_random import ADDED_TOKENS, write_tokenizer

from .batching import Batching
from .evaluate import evaluate
from .feeder import Feeder
from .network import Pointwise
from .recipe import SIDE, Phase, Recipe, demo_config
from .store import StateFile, read_weights, save_weights
from .tokens import BPE_SIZE, TOKENIZER_LESSONS, Encoder, training_texts
from .trainer import Trainer

LOG_EVERY = 50  # steps
SAVE_EVERY = 60.0  # seconds
_IN_FLIGHT = 3  # steps the host may be ahead of the device


@dataclass(frozen=True)
class Options:
    """minutes: of training in all. piece_minutes: of training in this call, at most. out: results (weights, tokenizer,
    run.json, train.log). work: the state to go on from, which is large. small: a tiny network for tests. compile: fuse
    elementwise operations with torch.compile. restart_rate: where a training goes on, let the learning rate fall again
    from `recipe.rate` over the time that is left."""

    out: Path
    work: Path
    minutes: float
    piece_minutes: float
    workers: int
    resume: bool = False
    device: str = "cuda"
    small: bool = False
    compile: bool = False
    restart_rate: bool = False
    tokenizer_lessons: int = TOKENIZER_LESSONS
    recipe: Recipe = Recipe()


class Session:
    """Everything but the loop's arguments; see `train` and `finish`."""

    def __init__(self, options: Options) -> None:
        self.options, self.recipe = options, options.recipe
        self.device = torch.device(options.device)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32 where float32 is asked for: DeltaNet, and evaluation
        options.out.mkdir(parents=True, exist_ok=True)
        options.work.mkdir(parents=True, exist_ok=True)
        self.raw_config = demo_config(self._tokenizer_ids(), small=options.small)
        self.config = ModelConfig.from_dict(self.raw_config)
        side = self.config.vision.patch_size * self.config.vision.spatial_merge_size
        self.grid = (SIDE // side, SIDE // side)
        self.elapsed, self.next_group, self.lessons, self.history = 0.0, 0, 0, []
        self.phases: dict[str, int] = {}  # steps that each phase took
        self.pieces: list[dict[str, float]] = []  # the calls that made this training
        self.state_file = StateFile(options.work)
        if not options.resume:
            (options.work / "train.log").unlink(missing_ok=True)
        self.trainer = self._trainer()
        self.rate_from = self.elapsed if options.restart_rate else 0.0  # seconds at which the fall of the rate began
        piece = {"rate": self.recipe.rate, "from_step": self.trainer.steps, "rate_from_second": round(self.rate_from, 1)}
        self.pieces = [*self.pieces, piece]
        if options.compile:
            self.fuse()

    def _tokenizer_ids(self) -> dict[str, int]:
        made, kept = self.options.work / "tokenizer.json", self.options.out / "tokenizer.json"
        if kept.is_file():
            shutil.copyfile(kept, made)
        elif not made.is_file():
            write_tokenizer(self.options.work, training_texts(self.options.tokenizer_lessons), BPE_SIZE)
        if not kept.is_file():
            shutil.copyfile(made, kept)
        tokenizer = Tokenizer.from_folder(self.options.work)
        return {content: tokenizer.token_to_id(content) for content, _ in ADDED_TOKENS}

    def _trainer(self) -> Trainer:
        """New, or from the state, or (on a machine that lost the state) from the weights and the record."""
        state = self.state_file.load() if self.options.resume else None
        if state is not None:
            trainer = Trainer(self.config, self.recipe, self.device, state["trainer"]["weights"])
            trainer.load(state["trainer"])
            self.elapsed, self.next_group = state["elapsed"], state["next_group"]
            self.lessons, self.history, self.phases, self.pieces = state["lessons"], state["history"], state["phases"], state["pieces"]
            return trainer
        record = self.options.out / "run.json"
        if self.options.resume and record.is_file():
            past = json.loads(record.read_text(encoding="utf-8"))
            trainer = Trainer(self.config, self.recipe, self.device, read_weights(self.options.out)[1])
            trainer.steps = trainer.started_at = past["steps"]
            self.elapsed, self.next_group, self.lessons = past["elapsed_seconds"], past["next_group"], past["lessons"]
            self.history, self.phases, self.pieces = past["loss_history"], past["phases"], past["pieces"]
            return trainer
        return Trainer(self.config, self.recipe, self.device)

    def fuse(self) -> None:
        """From here on with fused elementwise kernels; the first steps compile them."""
        self.trainer.network.text.pointwise = Pointwise.compiled()

    @property
    def phase(self) -> Phase:
        return self.recipe.phase(self.elapsed / self.total_seconds)

    def feeder(self) -> Feeder:
        """Lessons of the present phase."""
        recipe, kinds = self.recipe, self.phase.kinds
        plan = Batching(
            tokenizer=self.options.work, image_tokens=self.grid[0] * self.grid[1], vocab_size=self.config.text.vocab_size, side=SIDE,
            seed=recipe.seed, first_group=self.next_group, group=recipe.group, batch_lessons=recipe.batch_lessons if kinds else recipe.batch_pictures,
            batch_tokens=recipe.batch_tokens, trait_weight=recipe.trait_weight, kinds=kinds,
        )  # fmt: skip
        return Feeder(plan, self.grid, self.device, self.options.workers)

    @property
    def total_seconds(self) -> float:
        return self.options.minutes * 60

    @property
    def done(self) -> bool:
        return self.elapsed >= self.total_seconds

    def run(self) -> None:
        """Train through the phases until the planned time or this call's time is used up."""
        piece_end = self.elapsed + self.options.piece_minutes * 60
        while self.elapsed < min(self.total_seconds, piece_end):
            phase = self.phase
            self.log(f"phase {phase.name} from step {self.trainer.steps}, second {self.elapsed:.0f}")
            with self.feeder() as feeder:
                self.train(feeder, until=min(phase.until * self.total_seconds, piece_end))

    def train(self, feeder: Feeder, *, until: float = math.inf, max_steps: int | None = None) -> None:
        """Steps on lessons of one phase until `until` seconds of training or `max_steps`; saves the state at the end."""
        phase = self.phase
        if phase.name not in self.phases:
            self.phases[phase.name] = 0
            self.trainer.warm_up()
        batch = next(feeder)  # the clock starts when the workers are up
        clock = saved = logged = time.perf_counter()
        losses: list[torch.Tensor] = []
        seen = tokens = steps = 0
        waited = 0.0
        flight: deque = deque()
        while self.elapsed < until and (max_steps is None or steps < max_steps):
            losses.append(self.trainer.step(batch, (self.elapsed - self.rate_from) / (self.total_seconds - self.rate_from)))
            seen, tokens, steps = seen + len(batch), tokens + batch.tokens, steps + 1
            self.phases[phase.name] += 1
            self.lessons += len(batch)
            self.next_group = max(self.next_group, batch.group + 1)
            if self.device.type == "cuda":
                flight.append(torch.cuda.Event())
                flight[-1].record()
                if len(flight) > _IN_FLIGHT:
                    flight.popleft().synchronize()
            before = time.perf_counter()
            batch = next(feeder)
            now = time.perf_counter()
            waited += now - before
            self.elapsed, clock = self.elapsed + now - clock, now
            if len(losses) == LOG_EVERY:
                loss = float(torch.stack(losses).mean())
                self.history.append([self.trainer.steps, round(loss, 4)])
                passed = now - logged
                self.log(
                    f"step {self.trainer.steps} loss {loss:.4f} elapsed {self.elapsed:.0f} s, {seen / passed:.0f} lessons/s, "
                    f"{tokens / passed / 1000:.0f}k tokens/s, {1000 * passed / LOG_EVERY:.0f} ms a step, waited {100 * waited / passed:.0f}%"
                )
                if self.trainer.steps % (4 * LOG_EVERY) < LOG_EVERY:
                    self.log(f"  seen: {json.dumps(self.trainer.seen(batch))}")
                losses, seen, tokens, waited, logged = [], 0, 0, 0.0, now
                if not math.isfinite(loss):
                    raise RuntimeError("The loss is not finite; go on from the last state with a lower --rate.")
            if now - saved > SAVE_EVERY:
                self.save()
                saved = now
        if losses:
            self.history.append([self.trainer.steps, round(float(torch.stack(losses).mean()), 4)])
        self.save()
        self.state_file.wait()

    def save(self) -> None:
        self.state_file.save(
            {
                "trainer": self.trainer.state(), "elapsed": self.elapsed, "next_group": self.next_group,
                "lessons": self.lessons, "history": self.history, "phases": self.phases, "pieces": self.pieces,
            }
        )  # fmt: skip

    def finish(self, evaluated_lessons: int) -> dict[str, Any]:
        """Write the weights and the record; measure on held-out lessons unless the number is 0."""
        save_weights(self.options.out, self.trainer.network.weights, self.raw_config)
        self.record({})
        result: dict[str, Any] = {}
        if evaluated_lessons:
            self.trainer.network.text.pointwise = Pointwise()  # single tokens would only be compiled anew
            encoder = Encoder(self.options.work, self.grid[0] * self.grid[1])
            result = evaluate(self.trainer.network, encoder, evaluated_lessons)
            self.record(result)
        return result

    def record(self, evaluation: dict[str, Any]) -> None:
        cuda = self.device.type == "cuda"
        write_json(
            self.options.out / "run.json",
            {
                "minutes": self.options.minutes,
                "elapsed_seconds": round(self.elapsed, 1),
                "done": self.done,
                "steps": self.trainer.steps,
                "lessons": self.lessons,
                "phases": self.phases,
                "pieces": self.pieces,
                "next_group": self.next_group,
                "parameters": sum(weight.numel() for weight in self.trainer.network.weights.values()),
                "final_loss": self.history[-1][1] if self.history else None,
                "recipe": asdict(self.recipe),
                "device": torch.cuda.get_device_name() if cuda else platform.machine(),
                "torch": torch.__version__,
                "evaluation": evaluation,
                "loss_history": self.history,
            },
        )

    def log(self, line: str) -> None:
        print(line, flush=True)
        kept = self.options.work / "train.log"  # whole, also where each call has a new folder for results
        with open(kept, "a", encoding="utf-8", newline="\n") as stream:
            stream.write(line + "\n")
        shutil.copyfile(kept, self.options.out / "train.log")
