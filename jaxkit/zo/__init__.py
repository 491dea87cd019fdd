"""Zeroth-order gradients: training from evaluations of the loss alone."""

from jaxkit.zo._activation import activation as activation
from jaxkit.zo._directions import Direction as Direction
from jaxkit.zo._directions import gaussian as gaussian
from jaxkit.zo._directions import low_rank as low_rank
from jaxkit.zo._directions import orthogonal as orthogonal
from jaxkit.zo._directions import rademacher as rademacher
from jaxkit.zo._directions import sphere as sphere
from jaxkit.zo._gradient_estimator import gradient_estimator as gradient_estimator
from jaxkit.zo._node import node as node
from jaxkit.zo._probe import ZOProbe as ZOProbe
from jaxkit.zo._probe import apply_probe as apply_probe
from jaxkit.zo._probe import materialize as materialize
from jaxkit.zo._probe import probe as probe
from jaxkit.zo._realised_cosine import realised_cosine as realised_cosine
from jaxkit.zo._tap import Moments as Moments
from jaxkit.zo._tap import Site as Site
from jaxkit.zo._tap import Sites as Sites
from jaxkit.zo._tap import Tap as Tap
from jaxkit.zo._tap import tap as tap
from jaxkit.zo._value_and_zo_grad import value_and_zo_grad as value_and_zo_grad
from jaxkit.zo._zo_update import ZOInfo as ZOInfo
from jaxkit.zo._zo_update import ZOState as ZOState
from jaxkit.zo._zo_update import zo_init as zo_init
from jaxkit.zo._zo_update import zo_update as zo_update
