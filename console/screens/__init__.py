"""The seven screens: each says what it asks of the head, what it draws, and what its keys do."""

from __future__ import annotations

from console.screens.balance import BalanceScreen
from console.screens.base import LiveScreen
from console.screens.events import EventsScreen
from console.screens.experts import ExpertsScreen
from console.screens.over import OverScreen
from console.screens.ranks import RanksScreen
from console.screens.requests import RequestsScreen
from console.screens.transfer import TransferScreen

SCREENS: tuple[type[LiveScreen], ...] = (
    OverScreen,
    RanksScreen,
    ExpertsScreen,
    TransferScreen,
    RequestsScreen,
    BalanceScreen,
    EventsScreen,
)
"""In the order of their keys."""
