"""Tables of the papers, run again: `embrace bench reproduce`."""

from collections.abc import Mapping
from types import MappingProxyType

from bench.reproduce.combinations import COMBINATIONS
from bench.reproduce.domo import DOMO
from bench.reproduce.embracing import CASES_TABLE, IMDB, NORM, SCALING
from bench.reproduce.fedavg_table2 import EFFECTS, TABLE2
from bench.reproduce.fedlama_femnist import FEDLAMA
from bench.reproduce.partial_averaging import PARTIAL
from bench.reproduce.similarity import SVCCA
from bench.reproduce.table import Table

_ALL = (TABLE2, EFFECTS, SCALING, CASES_TABLE, NORM, IMDB, SVCCA, PARTIAL, FEDLAMA, DOMO, COMBINATIONS)
TABLES: Mapping[str, Table] = MappingProxyType({table.name: table for table in _ALL})
