"""Gradient estimators and the thin loops that join them to optimizers."""

from jaxkit._estimator import Estimate as Estimate
from jaxkit._estimator import Stateful as Stateful
from jaxkit.train._accumulate import accumulate as accumulate
from jaxkit.train._backprop import backprop as backprop
from jaxkit.train._fit import fit as fit
from jaxkit.train._loop import loop as loop
from jaxkit.train._restore import restore as restore
from jaxkit.train._state import TrainState as TrainState
from jaxkit.train._state import create as create
from jaxkit.train._step import make_step as make_step
