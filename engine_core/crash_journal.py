"""The crash journal: which requests were in the steps that engines have died of.

An engine notes the requests of a step before it computes them, and strikes the note out afterwards, in memory that its
supervisor holds. The next engine finds the note of the one that died in a step, and so a death counts for the requests
in that step and for no others. What has been counted is kept there too, until a request has got past the place where
engines died: then they died of something else. So are the convictions of the last minutes, by tenant.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels.errors import ModelError

_VERSION = 2
_MOST = 1 << 16  # requests of a step, and records: as many as the option max_num_seqs allows
_PLACE_MARGIN = 4  # tokens by which a request must get further than where engines died
_MOST_CONVICTIONS = 64  # that are kept, of all tenants
_SUSPICIOUS_DEATHS = 2
_CONVICTING_DEATHS, _CONVICTING_ALONE = 3, 2  # deaths in all, and of these in steps of its own
_CONVICTING_CRASHES = 2  # deaths of what the engine did itself, one of them in a step of its own

_RECORD = np.dtype([(name, "i8") for name in ("identity", "num_deaths", "num_alone", "num_crashes", "place")])
_LAYOUT = np.dtype(
    [
        ("is_crash", "i8"),  # of the last death, as the supervisor notes, who reads the next field too:
        ("num_in_step", "i8"),  # of the entries below; 0 between steps. See `quire.protocol.supervision`
        ("version", "i8"),
        ("in_step", [("identity", "i8"), ("place", "i8")], (_MOST,)),
        ("num_records", "i8"),  # of the rows below, some of which may have been dropped: their identity is 0
        ("records", _RECORD, (_MOST,)),
        ("num_convictions", "i8"),  # ever; the last ones are in the rows below
        ("convictions", [("identity", "i8"), ("tenant", "i8"), ("time", "f8")], (_MOST_CONVICTIONS,)),
    ]
)


@dataclass(slots=True)
class DeathRecord:
    """Deaths of engines under a request, none of which it has got past."""

    num_deaths: int = 0
    num_alone: int = 0  # deaths in a step of its own
    num_crashes: int = 0  # deaths that the engine caused itself (no signal from outside)
    place: int = 0  # tokens that the request must have computed to be past these deaths

    @property
    def is_suspect(self) -> bool:
        """True if the request is to be tried in steps of its own, however far it has got."""
        return self.num_deaths >= _SUSPICIOUS_DEATHS

    @property
    def is_guilty(self) -> bool:
        """True if no engine should work on it any more.

        One death alone may be a coincidence with a kill from outside; a second one at the same place is none, unless
        somebody kills engines as fast as they come.
        """
        if self.num_crashes >= _CONVICTING_CRASHES and self.num_alone:
            return True
        return self.num_deaths >= _CONVICTING_DEATHS and self.num_alone >= _CONVICTING_ALONE


class CrashJournal:
    """The journal in the memfd `fd`; without one, it is of use to nobody. Of one loop.

    `records` are by identity. `num_explained_deaths`: how many deaths are known only now to be the doing of a request,
    as a later one, in a step of its own, convicts it. Raises ModelError if the file is unusable.
    """

    def __init__(self, fd: int | None = None) -> None:
        try:
            if fd is not None:
                os.set_inheritable(fd, False)
                os.ftruncate(fd, _LAYOUT.itemsize)
            memory = mmap.mmap(-1 if fd is None else fd, _LAYOUT.itemsize)
        except OSError as error:
            advice = "give a memfd that the engine inherits, or leave it out"
            raise ModelError(f"crash_journal_fd={fd}: {error.strerror}; {advice}") from None
        self._cells: npt.NDArray[np.void] = np.frombuffer(memory, _LAYOUT, 1)
        self._rows = self._cells["records"][0]
        self._num_in_step = self._cells["num_in_step"]
        self._identities = self._cells["in_step"]["identity"][0]
        self._places = self._cells["in_step"]["place"][0]
        self._row_of: dict[int, int] = {}  # by identity
        self.num_explained_deaths = 0
        self.records = self._take_over() if self._cells["version"][0] == _VERSION else {}
        self._write()

    def begin_step(self, identities: Sequence[int], ends: Sequence[int]) -> None:
        """Note these requests, each with the tokens that it will have computed at the end of the step."""
        count = len(identities)
        self._identities[:count] = identities
        self._places[:count] = ends
        self._num_in_step[0] = count

    def end_step(self) -> None:
        """Strike the note out."""
        self._num_in_step[0] = 0

    def forget(self, identity: int) -> None:
        """Drop the record of a request, if it has one."""
        if self.records.pop(identity, None) is not None:
            self._rows["identity"][self._row_of.pop(identity)] = 0

    def convict(self, identity: int, tenant: str, now: float) -> None:
        """Note the conviction of a tenant's request, once."""
        kept = self._cells["convictions"][0]
        if identity not in kept["identity"]:
            count = self._cells["num_convictions"]
            kept[int(count[0]) % _MOST_CONVICTIONS] = identity, _number_of(tenant), now
            count += 1

    def convictions_since(self, tenant: str, since: float) -> list[float]:
        """Return the times of a tenant's convictions, the earliest first."""
        if not self._cells["num_convictions"][0]:
            return []
        kept = self._cells["convictions"][0]
        times = kept["time"][(kept["tenant"] == _number_of(tenant)) & (kept["time"] >= since)]
        return sorted(times.tolist())

    def _take_over(self) -> dict[int, DeathRecord]:
        """Return the records of the engine before, with its own death, for which its note counts."""
        rows = self._rows[: int(self._cells["num_records"][0])].tolist()
        records = {identity: DeathRecord(*counts) for identity, *counts in rows if identity}
        num_in_step = int(self._num_in_step[0])
        in_step = self._identities[:num_in_step].tolist(), self._places[:num_in_step].tolist()
        died: dict[int, int] = dict(zip(*in_step, strict=True))
        is_crash = bool(self._cells["is_crash"][0])
        self._num_in_step[0] = self._cells["is_crash"] = 0  # none counts twice
        for identity, end in died.items():
            if identity:
                record = records.pop(identity, None) or DeathRecord()
                record.num_deaths += 1
                record.num_crashes += is_crash
                record.place = max(record.place, end + _PLACE_MARGIN)
                records[identity] = record
                if num_in_step == 1:
                    record.num_alone += 1
                    if record.is_guilty:
                        self.num_explained_deaths = record.num_deaths - record.num_alone
        return dict(list(records.items())[-_MOST:])  # the oldest may be of clients that are gone

    def _write(self) -> None:
        """Write all records."""
        self._cells["num_records"] = 0
        for row, (identity, record) in enumerate(self.records.items()):
            self._rows[row] = identity, record.num_deaths, record.num_alone, record.num_crashes, record.place
            self._row_of[identity] = row
        self._cells["num_records"] = len(self.records)
        self._cells["version"] = _VERSION


def _number_of(tenant: str) -> int:
    return int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "little", signed=True)
