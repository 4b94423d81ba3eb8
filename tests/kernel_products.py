"""The products inside the Pallas kernels of a function, read from its trace."""

import jax


def kernel_precisions(function, *args):
    """[[precision of each product] of each kernel] of `function(*args)`."""
    kernels = _find(jax.make_jaxpr(function)(*args).jaxpr, "pallas_call")
    return [[product.params["precision"] for product in _find(k.params["jaxpr"], "dot_general")] for k in kernels]


def _find(jaxpr, name):
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            found.append(equation)
            continue
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += _find(inner, name)
    return found
