"""Tables of the papers, run again: `embrace bench reproduce`."""

from collections.abc import Mapping
from types import MappingProxyType

from bench.papers.combinations import COMBINATIONS
from bench.papers.domo import DOMO
from bench.papers.embracing import CASES_TABLE, IMDB, NORM, SCALING
from bench.papers.fedavg_table2 import EFFECTS, SPEEDUP, TABLE2
from bench.papers.fedlama_femnist import FEDLAMA
from bench.papers.open_questions import COHORTS, FROZEN_STATISTICS, PARTS, REFRESH
from bench.papers.partial_averaging import PARTIAL, UNEQUAL_TABLE
from bench.papers.similarity import SVCCA
from bench.papers.table import Table

_ALL = (
    *(TABLE2, EFFECTS, SPEEDUP),
    *(SCALING, CASES_TABLE, NORM, IMDB, SVCCA),
    *(PARTIAL, UNEQUAL_TABLE, FEDLAMA, DOMO),
    *(COMBINATIONS, REFRESH, FROZEN_STATISTICS, COHORTS, PARTS),
)
TABLES: Mapping[str, Table] = MappingProxyType({table.name: table for table in _ALL})
