"""``models/different_silos.py``: its density against SciPy, and a short run."""

import different_silos as model
import matplotlib.pyplot as plt
import numpy as np
import pytest
from numpyro.infer.util import log_density
from scipy import stats

THETA = {"a": -0.3, "b": 0.4, "m": 0.5, "s": 1.2}


def test_the_density_is_the_closed_form_and_the_parts_share_the_global_sites():
    silos = model.silos(0.1)
    rng = np.random.default_rng(1)
    z = {name: rng.normal(size=len(silos[name]["y"])) for name in ("proxy", "counts")}
    exact, proxy, counts = (silos[name] for name in ("exact", "proxy", "counts"))
    expected = stats.norm.logpdf(
        [THETA["a"], THETA["b"], THETA["m"]], 0, [2, 1, 2]
    ).sum() + stats.halfnorm.logpdf(THETA["s"], scale=2)
    x = {"exact": exact["x"], **{name: THETA["m"] + THETA["s"] * z[name] for name in z}}
    expected += stats.norm.logpdf(exact["x"], THETA["m"], THETA["s"]).sum()
    expected += sum(stats.norm.logpdf(v).sum() for v in z.values())
    expected += stats.norm.logpdf(proxy["proxy"], x["proxy"], model.NOISE).sum()
    for name, rows in (("exact", exact), ("proxy", proxy), ("counts", counts)):
        expected += stats.poisson.logpmf(rows["y"], np.exp(THETA["a"] + THETA["b"] * x[name])).sum()
    sites = {**THETA, "z_1": z["proxy"], "z_2": z["counts"]}
    found, _ = log_density(model.pooled, ([exact, proxy, counts],), {}, sites)
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Pareto's k:UserWarning")
def test_a_short_run_agrees_with_nuts_and_one_silo_does_not(tmp_path):
    found = model.main(["--quick", "--figure", str(tmp_path / "figure.png")])
    plt.close("all")
    assert (tmp_path / "figure.png").stat().st_size > 0
    three, alone = found["three silos"].table, found["the exact one alone"].table
    assert (three["error"] < 0.1 + 4 * three["mcse"]).all(), three
    assert three["sd_ratio"].between(0.85, 1.15).all(), three
    assert alone["error"].max() > 0.3
