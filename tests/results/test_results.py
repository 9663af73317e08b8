"""What ``compare`` claims: exact numbers first, then closed forms within k Monte-Carlo errors."""

import numpy as np
import pytest

from numpyro_fed._arviz import from_groups, group_of, import_arviz, set_group
from numpyro_fed.results.compare import _sinkhorn_distance, compare, plot_compare

az = import_arviz()
LARGE = (4, 5000)  # chains and draws: enough to judge at the default tolerances


@pytest.fixture
def rng():
    return np.random.default_rng(20)


def gaussian(rng, shape=LARGE, loc=0.0, scale=1.0):
    return {"x": loc + scale * rng.normal(size=shape)}


def only_row(*args, **kwargs):
    table = compare(*args, **kwargs).table
    assert len(table) == 1
    return table.iloc[0]


# exact


def test_equal_sets_have_no_error(rng):
    draws = {"x": 3 + 2 * rng.normal(size=LARGE), "b": rng.normal(size=(*LARGE, 2))}
    comparison = compare(draws, draws)
    assert list(comparison.table.index) == ["x", "b[0]", "b[1]"]
    np.testing.assert_allclose(comparison.table["error"], 0, atol=1e-12)
    np.testing.assert_allclose(comparison.table["sd_ratio"], 1, rtol=1e-12)
    np.testing.assert_allclose(comparison.table["w2"], 0, atol=1e-12)
    assert comparison.verdict == "agrees"


def test_statistics_are_arviz_combinations(rng):
    fed = {"x": 0.3 + 5 * rng.normal(size=(2, 700))}
    ref = {"x": 4 * rng.gamma(2, size=(3, 500))}
    row = only_row(fed, ref)
    f, r = fed["x"], ref["x"]
    assert row["mean_fed"] == pytest.approx(f.mean(), rel=1e-10)
    assert row["sd_ref"] == pytest.approx(r.std(ddof=1), rel=1e-10)
    assert row["error"] == pytest.approx(abs(f.mean() - r.mean()) / r.std(ddof=1), rel=1e-10)
    mcse = np.hypot(az.mcse(f), az.mcse(r)) / r.std(ddof=1)
    assert row["mcse"] == pytest.approx(mcse, rel=1e-8)
    ratio = f.std(ddof=1) / r.std(ddof=1)
    parts = [az.mcse(x, method="sd") / x.std(ddof=1) for x in (f, r)]
    assert row["sd_ratio"] == pytest.approx(ratio, rel=1e-10)
    assert row["sd_ratio_mcse"] == pytest.approx(ratio * np.hypot(*parts), rel=1e-8)
    assert row["ess_bulk"] == pytest.approx(az.ess(f, method="bulk"), rel=1e-8)
    assert row["ess_tail"] == pytest.approx(az.ess(f, method="tail", prob=(0.05, 0.95)), rel=1e-8)
    assert row["r_hat"] == pytest.approx(az.rhat(f), rel=1e-8)


def test_w2_by_sorting_and_with_unequal_sizes(rng):
    f, r = rng.normal(size=(2, 300)), rng.normal(size=(2, 300))
    row = only_row({"x": f}, {"x": r})
    gap = np.sort(f, axis=None) - np.sort(r, axis=None)
    w2 = np.sqrt(np.mean(gap**2)) / r.std(ddof=1)
    assert row["w2"] == pytest.approx(w2, rel=1e-10)
    # every draw of the fit written three times is the same empirical law, of another size
    thrice = only_row({"x": np.repeat(f, 3, axis=1)}, {"x": r})
    assert thrice["w2"] == pytest.approx(w2, rel=1e-10)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_affine_maps_change_nothing(rng, scale):
    fed, ref = rng.normal(size=(2, 500)), rng.normal(size=(2, 500))
    columns = ["error", "mcse", "sd_ratio", "sd_ratio_mcse", "w2"]
    plain = only_row({"x": fed}, {"x": ref})[columns].astype(float)
    mapped = only_row({"x": scale * (2 - fed)}, {"x": scale * (2 - ref)})[columns].astype(float)
    np.testing.assert_allclose(plain, mapped, rtol=1e-9)


def test_labels_use_coordinates_and_sites_may_be_chosen(rng):
    coords, dims = {"hospital": ["oslo", "bergen"]}, {"z": ["hospital"]}
    draws = {"z": rng.normal(size=(2, 100, 2)), "mu": rng.normal(size=(2, 100))}
    fit = from_groups({"posterior": draws}, coords=coords, dims=dims)
    labels = {"z": ["z[oslo]", "z[bergen]"], "mu": ["mu"]}
    # arviz sorts names where dm-tree is installed
    assert list(compare(fit, fit).table.index) == [
        x for name in fit.posterior.data_vars for x in labels[name]
    ]
    assert list(compare(fit, fit, var_names="mu").table.index) == ["mu"]


# closed forms and verdicts


def test_two_gaussians_give_the_closed_form(rng):
    shift, scale, k = 0.5, 1.3, 4.0
    row = only_row(gaussian(rng, loc=2 + 3 * shift, scale=3 * scale), gaussian(rng, loc=2, scale=3))
    assert abs(row["error"] - shift) < k * row["mcse"]
    assert abs(row["sd_ratio"] - scale) < k * row["sd_ratio_mcse"]
    # W2 of N(0, 1) and N(shift, scale²) is |(shift, scale - 1)|; the delta method gives its error
    w2 = np.hypot(shift, scale - 1)
    se = np.hypot(shift * row["mcse"], (scale - 1) * row["sd_ratio_mcse"]) / w2
    assert abs(row["w2"] - w2) < k * se
    # the standard errors are those of independent draws
    n = np.prod(LARGE)
    assert row["mcse"] == pytest.approx(np.sqrt((1 + scale**2) / n), rel=0.15)
    assert row["sd_ratio_mcse"] == pytest.approx(scale / np.sqrt(n), rel=0.15)


def test_many_draws_of_one_law_agree(rng):
    assert only_row(gaussian(rng), gaussian(rng))["verdict"] == "agrees"


def test_few_draws_are_undecided_although_means_are_equal(rng):
    draws = gaussian(rng, (4, 100))
    row = only_row(draws, draws)
    assert row["error"] < 1e-12
    assert row["verdict"] == "undecided"
    # few on one side are enough to leave it open
    assert only_row(gaussian(rng, (4, 100)), gaussian(rng))["verdict"] == "undecided"


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_too_few_draws_for_diagnostics_are_undecided(rng, draws):
    row = only_row(gaussian(rng, (1, draws)), gaussian(rng))
    assert row["verdict"] == "undecided"
    assert "fewer than 4" in row["note"]


@pytest.mark.parametrize(("loc", "scale"), [(0.5, 1.0), (0.0, 1.3), (0.0, 1 / 1.3)])
def test_wrong_laws_differ(rng, loc, scale):
    """Negative control: what is off by far more than its error must not agree."""
    assert only_row(gaussian(rng, loc=loc, scale=scale), gaussian(rng))["verdict"] == "differs"


@pytest.mark.parametrize(("loc", "scale"), [(0.1, 1.0), (0.0, 1.07), (0.0, 1 / 1.07)])
def test_laws_at_the_tolerance_keep_the_stated_rates(rng, loc, scale):
    """A difference equal to the tolerance agrees by chance in 2.3 %, differs in 0.1 %."""
    repeats, k = 60, 4
    verdicts = [
        only_row(gaussian(rng, (1, 8000), loc, scale), gaussian(rng, (1, 8000)))["verdict"]
        for _ in range(repeats)
    ]
    for verdict, rate in (("agrees", 0.0228), ("differs", 0.00135)):
        bound = repeats * rate + k * np.sqrt(repeats * rate * (1 - rate))
        assert verdicts.count(verdict) <= bound
    assert verdicts.count("undecided") > 0.85 * repeats


def test_tolerances_move_the_verdict(rng):
    fed, ref = gaussian(rng, loc=0.3, scale=1.2), gaussian(rng)
    assert compare(fed, ref).verdict == "differs"
    assert compare(fed, ref, mean_tolerance=0.5).verdict == "differs"
    assert compare(fed, ref, mean_tolerance=0.5, sd_tolerance=0.4).verdict == "agrees"


def test_chains_that_do_not_mix_cannot_agree(rng):
    fed, ref = gaussian(rng), gaussian(rng)
    fed["x"] = fed["x"] + np.array([-0.5, -0.5, 0.5, 0.5])[:, None]
    row = only_row(fed, ref, mean_tolerance=10, sd_tolerance=10)
    assert row["r_hat"] > 1.05
    assert (row["verdict"], row["note"]) == ("undecided", "r_hat > 1.05")
    row = only_row(ref, fed, mean_tolerance=10, sd_tolerance=10)
    assert (row["verdict"], row["note"]) == ("undecided", "reference r_hat > 1.05")


def test_single_chain_has_no_split_r_hat_and_may_agree(rng):
    row = only_row(gaussian(rng, (1, 20_000)), gaussian(rng))
    assert np.isnan(row["r_hat"])
    assert row["verdict"] == "agrees"


# joint laws


def correlated(rng, correlation, shape=LARGE):
    x, y = rng.normal(size=(2, *shape))
    return {"x": x, "y": 5 + 3 * (correlation * x + np.sqrt(1 - correlation**2) * y)}


@pytest.mark.ci
def test_joint_distance_of_equal_laws_is_that_of_the_references_halves(rng):
    joint = compare(correlated(rng, 0.8), correlated(rng, 0.8)).joint
    assert joint.num_draws == 1000
    assert 0 < joint.within_reference < 0.15
    assert 0.4 * joint.within_reference < joint.distance < 2 * joint.within_reference


@pytest.mark.ci
def test_joint_distance_sees_a_correlation_that_the_rows_miss(rng):
    comparison = compare(correlated(rng, 0.0), correlated(rng, 0.8))
    assert comparison.verdict == "agrees"
    assert comparison.joint.distance > 4 * comparison.joint.within_reference
    assert comparison.joint is comparison.joint  # computed once


def test_joint_distance_of_a_shift_is_the_shift_and_of_a_set_to_itself_zero(rng):
    """Exact: moving one of two equal sets adds the squared shift to the divergence."""
    x = rng.normal(size=(200, 3))
    assert _sinkhorn_distance(x, x) == pytest.approx(0, abs=1e-3)
    shift = np.array([1.0, 0.5, -0.7])
    assert _sinkhorn_distance(x, x + shift) == pytest.approx(np.sqrt(np.mean(shift**2)), rel=1e-4)


def test_joint_distance_is_symmetric(rng):
    x, y = rng.normal(size=(300, 3)), rng.standard_t(3, size=(300, 3)) + 0.4
    assert _sinkhorn_distance(x, y) == pytest.approx(_sinkhorn_distance(y, x), rel=1e-4)


def test_joint_distance_leaves_units_constants_and_bad_draws_out(rng):
    fed, ref = correlated(rng, 0.5, (2, 150)), correlated(rng, 0.5, (2, 100))
    plain = compare(fed, ref).joint
    assert plain.num_draws == 100
    scaled = compare(
        {"x": fed["x"] * 1e6, "y": 2 - fed["y"]}, {"x": ref["x"] * 1e6, "y": 2 - ref["y"]}
    ).joint
    np.testing.assert_allclose(scaled, plain, rtol=1e-3)
    more = compare(fed | {"one": np.ones((2, 150))}, ref | {"one": np.ones((2, 100))}).joint
    assert more == plain
    fed["x"][0, 1] = np.nan
    bad = compare(fed, ref).joint
    assert np.isnan(bad.distance)
    assert bad.within_reference == plain.within_reference
    assert np.isnan(compare({"x": np.ones((2, 9))}, {"x": np.ones((2, 9))}).joint.distance)


# rows without a spread or with draws off the reals


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_draw_that_is_not_finite_differs(rng, value):
    fed = {"x": gaussian(rng)["x"], "y": gaussian(rng)["x"]}
    ref = {"x": gaussian(rng)["x"], "y": gaussian(rng)["x"]}
    fed["y"][1, 7] = value
    comparison = compare(fed, ref)
    assert list(comparison.table["verdict"]) == ["agrees", "differs"]
    assert (comparison.verdict, comparison.worst) == ("differs", "y")
    assert "1 of 20000 draws not finite" in repr(comparison)
    assert compare(ref, fed).table.loc["y", "verdict"] == "undecided"


def test_constants(rng):
    one, spread = np.ones((4, 100)), rng.normal(size=(4, 100))
    # a correlation's diagonal: 1 up to the rounding of its own dtype
    rounded = np.where(rng.random((4, 100)) < 0.5, 1.0, np.nextafter(np.float32(1), np.float32(2)))
    assert only_row({"x": one}, {"x": one})["verdict"] == "agrees"
    assert only_row({"x": rounded.astype(np.float32)}, {"x": one})["verdict"] == "agrees"
    assert only_row({"x": 2 * one}, {"x": one})["verdict"] == "differs"
    assert only_row({"x": one}, {"x": spread})["verdict"] == "differs"
    assert only_row({"x": spread}, {"x": one})["verdict"] == "differs"


def test_chains_stuck_in_different_places_do_not_agree(rng):
    stuck = np.repeat(rng.normal(size=(4, 1)), 5000, axis=1)
    assert only_row({"x": stuck}, gaussian(rng))["verdict"] != "agrees"


# refusals


def test_mismatches_are_named(rng):
    a, b = rng.normal(size=(2, 50)), rng.normal(size=(2, 50, 3))
    with pytest.raises(ValueError, match=r"only in the fit: \['z'\].*reference: \['w'\].*'a'"):
        compare({"a": a, "z": a}, {"a": a, "w": a})
    assert len(compare({"a": a, "z": a}, {"a": a, "w": a}, var_names=["a"]).table) == 1
    with pytest.raises(ValueError, match=r"var_names \['c'\] are not in the fit"):
        compare({"a": a}, {"a": a}, var_names=["a", "c"])
    with pytest.raises(ValueError, match=r"'b': expected one shape.*\(3,\).*\(2,\)"):
        compare({"b": b}, {"b": b[..., :2]})
    with pytest.raises(ValueError, match="at least one parameter"):
        compare({"a": a}, {"a": a}, var_names=[])
    with pytest.raises(ValueError, match="mean_tolerance > 0, got 0"):
        compare({"a": a}, {"a": a}, mean_tolerance=0)
    with pytest.raises(ValueError, match="sd_tolerance > 0, got nan"):
        compare({"a": a}, {"a": a}, sd_tolerance=float("nan"))


def test_coordinates_groups_and_dimensions_are_checked(rng):
    z = {"z": rng.normal(size=(2, 50, 2))}
    fit = from_groups({"posterior": z}, coords={"h": ["oslo", "bergen"]}, dims={"z": ["h"]})
    other = from_groups({"posterior": z}, coords={"h": ["bergen", "oslo"]}, dims={"z": ["h"]})
    with pytest.raises(ValueError, match=r"'z': dimension 'h'.*coordinates"):
        compare(fit, other)
    with pytest.raises(ValueError, match="expected a posterior group"):
        compare(from_groups({"prior": z}), fit)
    set_group(fit, "posterior", group_of(fit, "posterior").isel(chain=0))
    with pytest.raises(ValueError, match="dimensions chain and draw"):
        compare(fit, other)


# words and pictures


def test_words_of_a_small_and_of_a_large_comparison(rng):
    ref = {"z": rng.normal(size=(2, 60, 40))}
    fed = {"z": ref["z"] + 3.0 * (np.arange(40) == 33)}
    comparison = compare(fed, ref)
    text = repr(comparison)
    assert comparison.worst == "z[33]"
    assert len(comparison.table) == 40
    assert text.splitlines()[1].startswith("z[33]")
    assert "16 worst of 40 rows" in text
    assert len(text.splitlines()) == 1 + 16 + 2
    assert text.splitlines()[-1].startswith("differs: 0 agree, 39 undecided, 1 differ. Largest")
    assert "More draws" in comparison.summary()
    assert "\n" not in comparison.summary()
    assert "nan" not in repr(compare({"x": np.ones((1, 9))}, {"x": np.ones((1, 9))}))
    html = compare({"a<b": ref["z"][..., 0]}, {"a<b": ref["z"][..., 0]})._repr_html_()
    assert "<table" in html
    assert "a&lt;b" in html
    assert "a<b" not in html


def test_pareto_k_of_a_variational_fit_is_judged_in_words(rng):
    ref = gaussian(rng)
    fit = from_groups({"posterior": gaussian(rng)})
    assert compare(fit, ref).pareto_k is None
    assert "Pareto" not in repr(compare(fit, ref)) + compare(fit, ref).summary()
    for k, words in (
        (0.29, " Pareto's k of the approximation 0.29, not above 0.7."),
        (0.7, " Pareto's k of the approximation 0.70, not above 0.7."),
        (
            0.85,
            " Pareto's k of the approximation 0.85, above 0.7: it misses part of the posterior.",
        ),
        (
            float("inf"),
            " Pareto's k of the approximation inf, above 0.7: it misses part of the posterior.",
        ),
    ):
        fit.posterior.attrs["pareto_k"] = np.float64(k)  # as netCDF returns it
        comparison = compare(fit, ref)
        assert comparison.pareto_k == k
        assert comparison.verdict == "agrees"  # k is no part of it
        assert comparison.closing_line().endswith(words)
        assert comparison.summary().endswith(words)
        assert repr(comparison).endswith(words)
        figure = plot_compare(fit, ref)
        assert any(text.get_text().endswith("\n" + words[1:]) for text in figure.texts)
        close(figure)
    # the reference's own k says nothing of the fit
    assert compare(gaussian(rng), fit).pareto_k is None


def close(figure):
    from matplotlib import pyplot

    pyplot.close(figure)


@pytest.mark.parametrize(("rows", "drawn"), [(1, 1), (5, 5), (15, 12)])
def test_figure_has_its_rows_and_saves(rng, tmp_path, rows, drawn):
    ref = {"z": rng.normal(size=(2, 60, rows))}
    fed = {"z": ref["z"] + 9.0 * (np.arange(rows) == rows - 1)}
    fed["z"][0, 0, 0] = np.nan
    figure = plot_compare(fed, ref)
    assert len(figure.axes) == 1 + drawn  # the forest, and a density for each row
    names = [text.get_text() for text in figure.axes[0].texts]
    assert f"z[{rows - 1}]" in names
    words = " ".join(text.get_text() for text in figure.texts)
    assert ("12 worst of 15" in words) == (rows > drawn)
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
    close(figure)


def test_figure_leaves_constants_out_and_draws_into_a_subfigure(rng):
    from matplotlib import pyplot

    draws = {"z": rng.normal(size=(2, 60)), "one": np.ones((2, 60))}
    whole = pyplot.figure(figsize=(10, 6))
    part = whole.subfigures(2, 1)[0]
    assert plot_compare(draws, draws, figure=part, labels=("ours", "theirs")) is part
    assert len(part.axes) == 2
    close(whole)
    with pytest.raises(ValueError, match="constants only"):
        plot_compare(draws, draws, var_names="one")
    with pytest.raises(ValueError, match="max_rows >= 1"):
        plot_compare(draws, draws, max_rows=0)
