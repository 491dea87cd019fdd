"""Normal equations of a quadratic that may be singular, with derivatives that stay finite."""

import functools

import jax
import jax.numpy as jnp

# The equations square the condition number; a product in bfloat16 would leave two digits of it.
dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def hessian(scatter, cross, prior, ridge, symmetric):
    """Returns A that minimizes ``sum |y - A x|**2 + ridge * |A - prior|**2`` of centered data.

    ``scatter`` is the sum of ``x x^T`` and ``cross`` that of ``y x^T``. In directions that no x has
    A is ``prior``, which is a matrix or None for zero.
    """
    rest = cross if prior is None else cross - dot(prior, scatter)
    if symmetric:
        change = symmetric_solution(scatter, rest, ridge)
    else:
        change = dot(rest, pseudo_inverse(scatter, ridge)[0])
    return change if prior is None else prior + change


@jax.custom_jvp
def pseudo_inverse(matrix, ridge):
    """Returns inverses of ``matrix + ridge`` and of ``matrix``, and the projector on the unseen.

    ``matrix`` is symmetric and not negative. Directions in which it is zero up to rounding are
    unseen: there both inverses are zero, since what they meet there would be rounding too.
    """
    values, vectors, seen = _decompose(matrix)

    def on_seen(inverse):
        return dot(vectors * jnp.where(seen, inverse, 0)[None], vectors.T)

    values = jnp.where(seen, values, 1)
    projector = dot(vectors * (~seen).astype(matrix.dtype)[None], vectors.T)
    return on_seen(1 / (values + ridge)), on_seen(1 / values), projector


@pseudo_inverse.defjvp
def _pseudo_inverse_jvp(primals, tangents):
    # Of eigenvectors only the two subspaces have a derivative: single ones have none where
    # eigenvalues meet, as all of the zeros do.
    inverse, plain, unseen = out = pseudo_inverse(*primals)
    change, ridge_change = tangents
    turn = dot(dot(plain, change), unseen)

    def moved(inverse):
        bend = dot(inverse, turn)
        return bend + bend.T - dot(dot(inverse, change), inverse)

    shrink = ridge_change * dot(inverse, inverse)
    return out, (moved(inverse) - shrink, moved(plain), -(turn + turn.T))


def symmetric_solution(scatter, cross, ridge):
    """Returns the A of least norm with ``A S + S A + 2 ridge A = cross + cross^T``, S scatter."""
    *_, unseen = pseudo_inverse(scatter, ridge)
    # The implicit derivative needs no eigenvectors, so the solver may use those of a constant.
    values, vectors, seen = _decompose(jax.lax.stop_gradient(scatter))
    pairs = jnp.where(seen[:, None] | seen[None], values[:, None] + values[None], 1)
    pairs += 2 * jax.lax.stop_gradient(ridge)

    def left_side(a):
        # The last term makes A zero between unseen directions, also after they have turned.
        half = dot(a, scatter)
        return half + dot(scatter, a) + 2 * ridge * a + dot(dot(unseen, a), unseen)

    def solve(_, right):
        return dot(dot(vectors, dot(dot(vectors.T, right), vectors) / pairs), vectors.T)

    right = cross + cross.T
    right -= dot(dot(unseen, right), unseen)
    return jax.lax.custom_linear_solve(left_side, right, solve, symmetric=True)


def _decompose(matrix):
    """Returns eigenvalues, eigenvectors, and which eigenvalues are above rounding."""
    values, vectors = jnp.linalg.eigh(matrix)
    values = jnp.maximum(values, 0)
    rounding = 10 * len(matrix) * jnp.finfo(matrix.dtype).eps * jnp.max(values, initial=0)
    return values, vectors, values > rounding
