"""The published design of nano-vllm's block manager and scheduler, re-expressed as a baseline.

Its ideas: a deque of free ids with `remove` in the middle, one hash chain per prefix (xxhash there,
BLAKE2b here: the registry client is not needed for a baseline), sequences in two deques.
"""

from collections import deque
from hashlib import blake2b


class NaiveBlocks:
    def __init__(self, num_blocks, block_size):
        self.size = block_size
        self.refs = [0] * num_blocks
        self.hashes = [b""] * num_blocks
        self.tokens = [[] for _ in range(num_blocks)]
        self.by_hash = {}
        self.free = deque(range(num_blocks))
        self.used = set()

    @staticmethod
    def digest(tokens, prefix):
        data = b"".join(t.to_bytes(4, "little") for t in tokens)
        return blake2b(prefix + data, digest_size=16).digest()

    def allocate(self, seq):
        prefix, miss = b"", False
        for at in range(0, len(seq.token_ids), self.size):
            tokens = seq.token_ids[at : at + self.size]
            prefix = self.digest(tokens, prefix) if len(tokens) == self.size else b""
            block = self.by_hash.get(prefix, -1)
            if block == -1 or self.tokens[block] != tokens:
                miss = True
            if miss:
                block = self.free[0]
                self._take(block)
            else:
                seq.num_cached_tokens += self.size
                if block in self.used:
                    self.refs[block] += 1
                else:
                    self._take(block)
            if prefix:
                self.hashes[block], self.tokens[block] = prefix, tokens
                self.by_hash[prefix] = block
            seq.block_table.append(block)

    def _take(self, block):
        self.refs[block] = 1
        self.hashes[block], self.tokens[block] = b"", []
        self.free.remove(block)
        self.used.add(block)

    def release(self, seq):
        for block in reversed(seq.block_table):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.used.remove(block)
                self.free.append(block)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def append(self, seq):
        last = seq.block_table[-1]
        if len(seq.token_ids) % self.size == 1:
            block = self.free[0]
            self._take(block)
            seq.block_table.append(block)
        elif len(seq.token_ids) % self.size == 0:
            at = len(seq.token_ids) - self.size
            before = seq.block_table[-2] if len(seq.block_table) > 1 else -1
            prefix = self.hashes[before] if before != -1 else b""
            digest = self.digest(seq.token_ids[at:], prefix)
            self.hashes[last], self.tokens[last] = digest, seq.token_ids[at:]
            self.by_hash[digest] = last


class NaiveSequence:
    def __init__(self, seq_id, token_ids):
        self.seq_id, self.token_ids = seq_id, token_ids
        self.block_table = []
        self.num_cached_tokens = 0


class NaiveScheduler:
    def __init__(self, blocks, max_batch):
        self.blocks, self.max_batch = blocks, max_batch
        self.waiting, self.running = deque(), deque()

    def admit(self):
        while self.waiting and len(self.running) < self.max_batch:
            seq = self.waiting.popleft()
            self.blocks.allocate(seq)
            self.running.append(seq)

    def schedule(self):
        """A decode step."""
        scheduled = []
        while self.running and len(scheduled) < self.max_batch:
            seq = self.running.popleft()
            if len(seq.token_ids) % self.blocks.size != 1 or self.blocks.free:
                self.blocks.append(seq)
                scheduled.append(seq)
        self.running.extendleft(reversed(scheduled))
        return scheduled

    def update(self, seqs, tokens):
        for seq, token in zip(seqs, tokens, strict=True):
            seq.token_ids.append(token)
