"""Rows of the embedding that adapters change, token by token: rows of their own, and low-rank changes.

A row is the adapter's own or else the base's, plus factor * B a, where a is the token's column of A; all times the
scale of the embedding. Sums run over the even and the odd ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.kernels.emit.adapters import RowAdapters
from quire.kernels.emit.builder import F32, I64, PTR, VF32, Builder, Value
from quire.kernels.emit.layout import BLOCK, PAIRS, TILE_ROWS, Dtypes, load_activation, load_pair, round_up

EMBEDDING_ENTRY_BYTES = 48
"""Bytes of an adapter in the table: i64 addresses of the numbers of its own rows, of these, of the columns of A and of
B; the number of pairs of ranks, and the f32 factor.

Numbers of rows are i32 [vocabulary], 0 for tokens whose row is the base's, or else 1 and more; without any the address
is 0. Rows have the width of the embedding rounded up to 32, and are in the dtype of weights, as A is, [vocabulary]
[ranks]. B is packed in tiles of 16 columns by pairs of ranks."""


@dataclass(frozen=True)
class AdaptedRows:
    """The adapters of rows, and the address of the embedding's table of adapters."""

    rows: RowAdapters
    table: Value

    def apply(self, b: Builder, dtypes: Dtypes, row: Value, token: Value, target: Value, form: RowForm) -> None:
        """Change the embedding of a row's token, f32 at `target`, as its adapter does."""
        entry = b.address(self.table, self.rows.number(b, row) * EMBEDDING_ENTRY_BYTES)
        with b.when(b.compare("ne", b.load(entry, 0, I64), 0)):
            number = b.load_index(b.load(entry, 0, PTR), token)
            with b.when(b.compare("ne", number, 0)):
                self._replace(b, dtypes, b.load(entry, 8, PTR), number, target, form)
        pairs = b.load(entry, 32, I64)
        with b.when(b.compare("ne", pairs, 0)):
            self._add(b, dtypes, entry, pairs, token, target, form)

    @staticmethod
    def _replace(b: Builder, dtypes: Dtypes, rows: Value, number: Value, target: Value, form: RowForm) -> None:
        stored = _stored(dtypes)
        source = b.address(rows, (number - 1) * (round_up(form.width, BLOCK) * stored.activation_bytes))
        with b.loop(0, form.width // TILE_ROWS) as part:
            value = load_activation(b, stored, source, part.index * (TILE_ROWS * stored.activation_bytes))
            b.store(form.scaled(value), target, part.index * 64, 64)

    @staticmethod
    def _add(
        b: Builder, dtypes: Dtypes, entry: Value, pairs: Value, token: Value, target: Value, form: RowForm
    ) -> None:
        stored, pair_bytes = _stored(dtypes), dtypes.plain.tile_bytes // PAIRS
        size = stored.activation_bytes
        factors = b.address(b.load(entry, 16, PTR), token * (pairs * (2 * size)))
        factor = b.broadcast(b.load(entry, 40, F32))
        with b.loop(0, form.width // TILE_ROWS) as part:
            tile = b.address(b.load(entry, 24, PTR), part.index * (pairs * pair_bytes))
            with b.loop(0, pairs, state=[b.constant(0.0, VF32)] * 2) as pair:
                ranks = load_pair(b, dtypes.plain, tile, pair.index)
                both = [
                    b.broadcast(load_activation(b, stored, factors, pair.index * (2 * size) + i * size, lanes=1))
                    for i in range(2)
                ]
                pair.carry(*map(b.fma, both, ranks, pair.state))
            change = (pair.results[0] + pair.results[1]) * factor
            at = part.index * 64
            b.store(b.load(target, at, VF32, 64) + form.scaled(change), target, at, 64)


@dataclass(frozen=True)
class RowForm:
    """The width of an embedding, a multiple of 16, and what multiplies its rows."""

    width: int
    scale: float

    def scaled(self, value: Value) -> Value:
        """Return elements of a row times the scale."""
        return value if self.scale == 1 else value * self.scale


def _stored(dtypes: Dtypes) -> Dtypes:
    """Return dtypes whose activations are stored as weights are."""
    return replace(dtypes.plain, activations=dtypes.plain.weights)
