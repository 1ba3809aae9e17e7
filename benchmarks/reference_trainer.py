"""A trainer that shares no code with mens_exp, for `independent.py` to compare runs with.

It is a plain loop over torch, transformers and PEFT. Rendering, masks, losses, clipping, schedules
and validation are implemented from their definitions, and every document is a separate forward
pass, without padding or packing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

RATE, CLIP = 3e-3, 0.5
START, END = 1, 2  # token ids of <|im_start|> and <|im_end|>
MICRO_BATCHES = Path("micro_batches.json")  # token ids of the documents of each step

Row = dict[str, Any]
Parameters = list[torch.nn.Parameter]


class Document(NamedTuple):
    """One text: token ids, supervised positions, and origin."""

    ids: list[int]
    learned: list[int]
    row: Row
    side: str  # response, chosen or rejected


class Models(NamedTuple):
    """The trained model, the model without and with the initial adapter, and a teacher."""

    policy: Any
    base: Any
    first: Any
    teacher: Any


class Outcome(NamedTuple):
    """The metrics of one trainer, as lists over steps, and its adapter."""

    figures: dict[str, list[float]]
    adapter: dict[str, Tensor]


Loss = Callable[[Models, list[list[Document]]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One training setup; ``loss`` computes the loss of a step from its micro-batches."""

    name: str
    family: str = "llama"
    overrides: tuple[str, ...]
    lora: tuple[tuple[str, Any], ...] = ()  # settings of PEFT
    rows: tuple[Row, ...]
    validated: tuple[Row, ...]
    turns: str = "all"
    last_tokens: int = 0
    loss: Loss
    validation: Loss
    optimizer: Callable[[Parameters], torch.optim.Optimizer]
    rate: Callable[[int, int], float] = lambda _step, _steps: 1.0


def trained_by_reference(probe: Probe) -> Outcome:
    """Train one document at a time, on the micro-batches recorded by the last run."""
    place = AutoTokenizer.from_pretrained("model")
    known = {tuple(one.ids): one for row in probe.rows for one in documents(place, row, probe)}
    validated = [[one for row in probe.validated for one in documents(place, row, probe)]]
    by_step: defaultdict[int, list[list[Document]]] = defaultdict(list)
    for step, found in json.loads(MICRO_BATCHES.read_text("utf-8")):
        by_step[step].append([known[tuple(ids)] for ids in found])
    policy = loaded("model", "first")
    several = Models(policy, loaded("model"), loaded("model", "first"), loaded("teacher"))
    parameters = [one for one in policy.parameters() if one.requires_grad]
    optimizer = probe.optimizer(parameters)
    highest = optimizer.param_groups[0]["lr"]
    figures: defaultdict[str, list[float]] = defaultdict(list)
    with torch.no_grad():
        untrained = several._replace(policy=several.base)
        figures["validation loss"].append(probe.validation(untrained, validated).item())
    for step in sorted(by_step):
        optimizer.zero_grad()
        loss = probe.loss(several, by_step[step])
        loss.backward()  # type: ignore[no-untyped-call]
        squares = [(one.grad.double() ** 2).sum() for one in parameters if one.grad is not None]
        norm = math.sqrt(sum(one.item() for one in squares))
        for one in parameters:
            if one.grad is not None and norm > CLIP:
                one.grad.mul_(CLIP / (norm + 1e-6))  # as in torch
        optimizer.param_groups[0]["lr"] = highest * probe.rate(step, len(by_step))
        optimizer.step()
        figures["loss"].append(loss.item())
        figures["gradient norm"].append(norm)
        figures["learning rate"].append(optimizer.param_groups[0]["lr"])
    with torch.no_grad():
        figures["validation loss"].append(probe.validation(several, validated).item())
    adapter = {name: one.detach() for name, one in get_peft_model_state_dict(policy).items()}
    return Outcome(dict(figures), adapter)


def loaded(place: str, adapter: str | None = None) -> Any:
    """Load a model, optionally with a trainable adapter, without dropout."""
    model = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, attn_implementation="eager"
    )
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return model.eval()


def adapter_in(place: Path) -> dict[str, Tensor]:
    """Read the tensors of a PEFT directory."""
    return dict(load_file(place / "adapter_model.safetensors"))


def documents(text: Any, row: Row, probe: Probe) -> list[Document]:
    """Render a row: assistant turns and their end markers are supervised."""
    if "messages" in row:
        said = {"response": row["messages"]}
    else:
        sides = [name for name in ("response", "chosen", "rejected") if name in row]
        asked = {"role": "user", "content": row["prompt"]}
        said = {one: [asked, {"role": "assistant", "content": row[one]}] for one in sides}
    found = []
    for side, messages in said.items():
        ids: list[int] = []
        learned: list[int] = []
        for place, message in enumerate(messages):
            head = f"{message['role']}\n"
            ids += [START, *text(head, add_special_tokens=False)["input_ids"]]
            body = [*text(message["content"], add_special_tokens=False)["input_ids"], END]
            wanted = message.get("weight", 1) and (
                probe.turns == "all" or place + 1 == len(messages)
            )
            if message["role"] == "assistant" and wanted:
                learned += range(len(ids), len(ids) + len(body))
            ids += body
            if place + 1 < len(messages):
                ids += text("\n", add_special_tokens=False)["input_ids"]
        if probe.last_tokens:
            learned = list(range(len(ids) - probe.last_tokens, len(ids)))
        found.append(Document(ids, learned, row, side))
    return found


def predicted(model: Any, one: Document) -> tuple[Tensor, Tensor]:
    """Return the logits that predict the supervised tokens, and those tokens."""
    logits_TV = model(input_ids=torch.tensor([one.ids]), use_cache=False).logits[0]
    return logits_TV[[place - 1 for place in one.learned]], torch.tensor(one.ids)[one.learned]


def log_probs(model: Any, one: Document) -> Tensor:
    """Return the log-probability of each supervised token."""
    logits_MV, tokens_M = predicted(model, one)
    return logits_MV.log_softmax(-1).gather(-1, tokens_M[:, None])[:, 0]


def cross_entropy(several: Models, one: Document) -> Tensor:
    """Return the negative log-probability of each supervised token."""
    return -log_probs(several.policy, one)


def smoothed_with_z(smoothing: float, z: float) -> Callable[[Models, Document], Tensor]:
    """Return cross-entropy with label smoothing, plus z times the squared log-partition."""

    def value(several: Models, one: Document) -> Tensor:
        logits_MV, tokens_M = predicted(several.policy, one)
        log_MV = logits_MV.log_softmax(-1)
        plain = -log_MV.gather(-1, tokens_M[:, None])[:, 0]
        even = -log_MV.mean(-1)
        return (1 - smoothing) * plain + smoothing * even + z * logits_MV.logsumexp(-1) ** 2

    return value


def distilled(beta: float, heat: float, plain: float) -> Callable[[Models, Document], Tensor]:
    """Return the generalized Jensen-Shannon divergence from a teacher, mixed with cross-entropy."""

    def value(several: Models, one: Document) -> Tensor:
        student = (predicted(several.policy, one)[0] / heat).softmax(-1)
        with torch.no_grad():
            teacher = (predicted(several.teacher, one)[0] / heat).softmax(-1)
        mixed = beta * teacher + (1 - beta) * student
        from_teacher = (teacher * (teacher / mixed).log()).sum(-1)
        from_student = (student * (student / mixed).log()).sum(-1)
        divergence = beta * from_teacher + (1 - beta) * from_student
        return (1 - plain) * divergence + plain * cross_entropy(several, one)

    return value


def mean_of_tokens(
    value: Callable[[Models, Document], Tensor], weight: Callable[[Row], float] = lambda _row: 1.0
) -> Loss:
    """Return the mean over all supervised tokens of a step, regardless of micro-batches."""

    def loss(several: Models, micro_batches: list[list[Document]]) -> Tensor:
        every = list(chain(*micro_batches))
        total = sum(weight(one.row) * value(several, one).sum() for one in every)
        return torch.as_tensor(total / sum(weight(one.row) * len(one.learned) for one in every))

    return loss


def mean_of_pairs(value: Callable[[dict[str, Tensor], Document], Tensor]) -> Loss:
    """Return the mean over all pairs of a step; a loss gets sums and means of log-probs."""

    def loss(several: Models, micro_batches: list[list[Document]]) -> Tensor:
        every = list(chain(*micro_batches))
        answers = {(one.row["prompt"], one.side): one for one in every}
        values = []
        for chosen in (one for one in every if one.side == "chosen"):
            found = {}
            for one in (chosen, answers[chosen.row["prompt"], "rejected"]):
                with torch.no_grad():
                    base = log_probs(several.base, one)
                policy = log_probs(several.policy, one)
                found[f"{one.side} mean"] = policy.mean()
                found[f"{one.side} gain"] = policy.sum() - base.sum()
                found[f"{one.side} mean gain"] = policy.mean() - base.mean()
            whole = chosen._replace(learned=list(range(1, len(chosen.ids))))
            found["text"] = log_probs(several.policy, whole).mean()
            values.append(value(found, chosen))
        return torch.stack(values).mean()

    return loss


def dpo(found: dict[str, Tensor], _one: Document) -> Tensor:
    """Return DPO's sigmoid loss with beta 0.3."""
    return -functional.logsigmoid(0.3 * (found["chosen gain"] - found["rejected gain"]))


def ipo(found: dict[str, Tensor], _one: Document) -> Tensor:
    """Return IPO's loss with beta 0.3, on per-token log-ratios as in TRL."""
    return (found["chosen mean gain"] - found["rejected mean gain"] - 1 / (2 * 0.3)) ** 2


def orpo(found: dict[str, Tensor], _one: Document) -> Tensor:
    """Return ORPO's loss with beta 0.25; as in TRL, the NLL term covers the whole chosen text."""
    odds = [found[f"{side} mean"] for side in ("chosen", "rejected")]
    good, bad = (one - (-one.exp()).log1p() for one in odds)
    return -found["text"] - 0.25 * functional.logsigmoid(good - bad)


def grpo(rows: list[Row]) -> Loss:
    """Return GRPO's loss, clipped at 0.2; its KL term of beta 0.04 is weighted by the ratio."""
    rewards = defaultdict(list)
    for row in rows:
        rewards[row["prompt"]].append(row["fields"]["reward"])

    def loss(several: Models, micro_batches: list[list[Document]]) -> Tensor:
        values = []
        for one in chain(*micro_batches):
            group = rewards[one.row["prompt"]]
            gain = one.row["fields"]["reward"] - statistics.mean(group)
            gain /= statistics.stdev(group) + 1e-4
            with torch.no_grad():
                old, base = log_probs(several.first, one), log_probs(several.base, one)
            new = log_probs(several.policy, one)
            ratio = (new - old).exp()
            surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            divergence = ratio * ((base - new).exp() - (base - new) - 1)
            values.append((0.04 * divergence - surrogate).mean())
        return torch.stack(values).mean()

    return loss


def adamw(parameters: Parameters) -> torch.optim.Optimizer:
    """Make AdamW without weight decay."""
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, eps=1e-4)


class Lion(torch.optim.Optimizer):
    """Lion as in its paper (Chen et al. 2023, arXiv:2302.06675, program 1)."""

    def __init__(self, parameters: Parameters, lr: float, decay: float) -> None:
        """Store the learning rate and the decoupled weight decay."""
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update with the sign of the interpolated momentum."""
        assert closure is None, "the loop computes the gradients"
        for group in self.param_groups:
            for one in group["params"]:
                momentum = self.state[one].setdefault("momentum", torch.zeros_like(one))
                update = (0.9 * momentum + 0.1 * one.grad).sign() + group["decay"] * one
                one.sub_(group["lr"] * update)
                momentum.mul_(0.99).add_(0.01 * one.grad)


def cosine(step: int, steps: int) -> float:
    """Warm up over three steps, then decay on half a cosine."""
    late = max(0, step - 3) / (steps - 3)
    return min((step + 1) / 3, 0.5 * (1 + math.cos(math.pi * late)))


def stable(step: int, steps: int) -> float:
    """Warm up over two steps, hold, and decay linearly over the last four."""
    return min((step + 1) / 2, 1.0, (steps - step) / 4)


def one_cycle(step: int, steps: int) -> float:
    """Return the rate of torch's one-cycle schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=steps, cycle_momentum=False
    )
    for _ in range(step):
        optimizer.step()
        schedule.step()
    return float(optimizer.param_groups[0]["lr"])
