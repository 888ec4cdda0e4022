"""Who sends requests: single questions, chats, and agents with side turns and subagents.

A client is a generator: it yields a turn and is sent the answer's tokens.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator

import attrs

VOCABULARY = 32_000


@attrs.frozen(kw_only=True)
class Turn:
    """One request."""

    prompt: list[int]
    max_new_tokens: int
    delay_s: float = 0.0
    """After the client's last answer (its first turn: after its arrival)."""
    session: str = ""
    priority: int = 0


Client = Generator[Turn, list[int], None]


def words(rng: random.Random, count: int) -> list[int]:
    """`count` random tokens."""
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def mixed_length(rng: random.Random) -> int:
    """30 % under 128 tokens, 40 % up to 1,024, 30 % beyond, up to 4,096 (C50)."""
    low, high = rng.choices(((16, 127), (128, 1024), (1025, 4096)), (30, 40, 30))[0]
    return rng.randint(low, high)


def question(rng: random.Random, name: str, answer: int = 128) -> Client:
    """One request, no follow-up."""
    new = min(8 * answer, max(1, round(rng.expovariate(1 / answer))))
    yield Turn(prompt=words(rng, mixed_length(rng)), max_new_tokens=new, session=name)


@attrs.frozen(kw_only=True)
class AgentShape:
    """How an agent works. Tokens, turns, probabilities."""

    system: int = 3_000
    tool_result: int = 400
    answer: int = 150
    turns: int = 20
    think_s: float = 2.0
    side_turn: float = 0.3
    """Chance after a turn that the client asks for a title or a summary of its last words."""
    side_tokens: int = 600
    subagent: float = 0.12
    """Chance after a turn that a subagent is sent to work, while the main one waits."""
    subagent_turns: int = 8
    subagent_system: int = 1_500
    pause: float = 0.08
    """Chance after a turn that the user goes away for a while."""
    pause_s: float = 60.0


@attrs.frozen
class Prompts:
    """System prompts that all agents of one kind share."""

    main: list[int]
    sub: list[int]
    side: list[int]

    @classmethod
    def make(cls, rng: random.Random, shape: AgentShape) -> Prompts:
        return cls(words(rng, shape.system), words(rng, shape.subagent_system), words(rng, 200))


def agent(
    rng: random.Random, name: str, shape: AgentShape, prompts: Prompts, priority: int = 0
) -> Client:
    """A long conversation with side turns and subagents between its turns (PH#31 .. PH#97)."""
    history = prompts.main + words(rng, shape.tool_result)
    delay = 0.0
    for _ in range(shape.turns):
        history = history + (
            yield Turn(
                prompt=history,
                max_new_tokens=_around(rng, shape.answer),
                delay_s=delay,
                session=name,
                priority=priority,
            )
        )
        if rng.random() < shape.side_turn:
            yield Turn(
                prompt=prompts.side + history[-shape.side_tokens :],
                max_new_tokens=20,
                session=name,
            )
        if rng.random() < shape.subagent:
            yield from _subagent(rng, name, shape, prompts)
        history = history + words(rng, _around(rng, shape.tool_result))
        delay = rng.expovariate(1 / shape.think_s)
        if rng.random() < shape.pause:
            delay += rng.expovariate(1 / shape.pause_s)


def _subagent(rng: random.Random, name: str, shape: AgentShape, prompts: Prompts) -> Client:
    """Its own conversation, over for good when it reports back."""
    history = prompts.sub + words(rng, shape.tool_result)
    for _ in range(max(1, round(rng.expovariate(1 / shape.subagent_turns)))):
        history = history + (
            yield Turn(
                prompt=history,
                max_new_tokens=_around(rng, shape.answer),
                delay_s=rng.expovariate(1 / 0.5),
                session=name,
            )
        )
        history = history + words(rng, _around(rng, shape.tool_result))


def _around(rng: random.Random, mean: int) -> int:
    return max(1, round(rng.gauss(mean, mean / 4)))


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Arrival times with `rate` per second."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursty(rng: random.Random, rate: float, burst: float = 8.0) -> Iterator[float]:
    """The same mean rate, in bursts of about `burst` arrivals at ten times the rate."""
    now = 0.0
    while True:
        count = max(1, round(rng.expovariate(1 / burst)))
        for _ in range(count):
            now += rng.expovariate(10 * rate)
            yield now
        now += rng.expovariate(1 / (0.9 * count / rate))
