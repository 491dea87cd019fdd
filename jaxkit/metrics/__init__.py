"""Sample metrics on arrays of features: fidelity, coverage and distances of two samples."""

from jaxkit.metrics._bootstrap import Interval as Interval
from jaxkit.metrics._bootstrap import bootstrap as bootstrap
from jaxkit.metrics._chamfer import Chamfer as Chamfer
from jaxkit.metrics._chamfer import chamfer as chamfer
from jaxkit.metrics._chamfer import halves as halves
from jaxkit.metrics._density_coverage import DensityCoverage as DensityCoverage
from jaxkit.metrics._density_coverage import density_coverage as density_coverage
from jaxkit.metrics._frechet_distance import frechet_distance as frechet_distance
from jaxkit.metrics._kid import kid as kid
from jaxkit.metrics._nearest import Neighbors as Neighbors
from jaxkit.metrics._nearest import nearest as nearest
from jaxkit.metrics._precision_recall import PrecisionRecall as PrecisionRecall
from jaxkit.metrics._precision_recall import precision_recall as precision_recall
from jaxkit.metrics._sliced_wasserstein import sliced_wasserstein as sliced_wasserstein
