"""What eviction costs agents: tokens computed again, per policy, against LRU and the optimum.

A trace (prompts and answers in a fixed order) is replayed on the real block pool, so policies
are compared on the very same accesses and the clairvoyant one can know the future.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import attrs

from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.eviction import ByScore, EvictionPolicy
from halogen_core.kv.node import Node
from halogen_core.kv.policies import EVICTION_POLICIES, eviction_policy
from halogen_core.kv.tree import ReuseRules, pack_tokens
from halogen_core.simulation.clients import AgentShape, Client, Prompts, agent, words

NEVER = float("inf")


@attrs.frozen
class Access:
    """One turn of a trace."""

    tokens: list[int]
    """Prompt and answer."""
    num_prompt: int
    priority: int
    session: str


def agent_trace(*, agents: int, seed: int, shape: AgentShape | None = None) -> list[Access]:
    """The turns of `agents` agents in the order of a clock on which answers take no time.

    The first agent is the user's own, with priority 1.
    """
    rng = random.Random(seed)
    shape = shape or AgentShape()
    prompts = Prompts.make(rng, shape)
    heap: list[tuple[float, int, Client]] = []
    trace: list[Access] = []
    turns = {}
    for i in range(agents):
        client = agent(random.Random(rng.random()), f"agent{i}", shape, prompts, int(i == 0))
        turns[i] = next(client)
        heapq.heappush(heap, (rng.uniform(0, shape.think_s * shape.turns), i, client))
    while heap:
        now, i, client = heapq.heappop(heap)
        turn = turns[i]
        answer = words(rng, turn.max_new_tokens)
        trace.append(Access(turn.prompt + answer, len(turn.prompt), turn.priority, turn.session))
        try:
            turns[i] = client.send(answer)
        except StopIteration:
            continue
        heapq.heappush(heap, (now + 0.5 + turns[i].delay_s, i, client))
    return trace


@attrs.define(eq=False)
class Clairvoyant(ByScore):
    """Evicts what is wanted again last (Belady, 1966): no policy can do better on this trace.

    A child is never wanted before its parent, so going by leaves costs it nothing.
    """

    uses: dict[int, list[int]]
    """Content of a block with its prefix -> the turns that read it, last first."""
    now: int = 0
    _keys: dict[Node, int] = attrs.field(factory=dict, init=False)

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    @classmethod
    def of(cls, trace: Sequence[Access], block_size: int) -> Clairvoyant:
        uses: dict[int, list[int]] = {}
        for i in range(len(trace) - 1, -1, -1):
            for key in _block_keys(trace[i].tokens[: trace[i].num_prompt], block_size):
                uses.setdefault(key, []).append(i)
        return cls(uses)

    def score(self, node: Node) -> tuple[float, ...]:
        coming = self.uses.get(self._key(node), [])
        while coming and coming[-1] <= self.now:
            coming.pop()
        return (-coming[-1] if coming else -NEVER, -node.depth)

    def _key(self, node: Node) -> int:
        key = self._keys.get(node)
        if key is None:
            parent = node.parent
            above = 0 if parent is None or parent.is_root else self._key(parent)
            key = self._keys[node] = hash((above, node.tokens))
        return key


def _block_keys(tokens: Sequence[int], size: int) -> list[int]:
    keys, above = [], 0
    for at in range(0, len(tokens) - size + 1, size):
        above = hash((above, pack_tokens(tokens[at : at + size])))
        keys.append(above)
    return keys


@attrs.frozen(kw_only=True)
class CachingResult:
    """What one policy did on a trace."""

    policy: str
    prompt_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    """Computed, although they had been computed before."""


def replay(
    trace: Sequence[Access],
    num_blocks: int,
    policy: EvictionPolicy,
    size: int,
    *,
    min_tail: int | None = None,
) -> int:
    """Prompt tokens that had to be computed; whole blocks only unless `min_tail` is given."""
    rules = ReuseRules(min_tail=min_tail or size)
    pool = BlockPool(num_blocks, size, eviction=policy, rules=rules)
    computed = 0
    for i, access in enumerate(trace):
        if isinstance(policy, Clairvoyant):
            policy.now = i
        pool.begin_step()
        lease = pool.open(i, priority=access.priority, session=access.session)
        match = pool.match(lease, access.tokens[: access.num_prompt])
        pool.adopt(lease, match)
        while not pool.grow(lease, len(access.tokens)):
            assert pool.unpin_oldest(), "one turn must fit in the pool"
        computed += access.num_prompt - match.num_tokens
        pool.end_step()
        pool.release(lease, access.tokens, len(access.tokens))
    return computed


def compare_policies(
    trace: Sequence[Access], num_blocks: int, block_size: int = 16
) -> list[CachingResult]:
    """All policies and the clairvoyant optimum on one trace."""
    everything = sum(len(a.tokens) // block_size + 1 for a in trace)
    least = replay(trace, everything, eviction_policy("lru"), block_size)
    policies = {spec.name: eviction_policy(spec.name) for spec in EVICTION_POLICIES}
    policies["clairvoyant"] = Clairvoyant.of(trace, block_size)
    prompt = sum(access.num_prompt for access in trace)
    results = []
    for name, policy in policies.items():
        computed = replay(trace, num_blocks, policy, block_size)
        results.append(
            CachingResult(
                policy=name,
                prompt_tokens=prompt,
                computed_tokens=computed,
                recomputed_tokens=computed - least,
            )
        )
    return results
