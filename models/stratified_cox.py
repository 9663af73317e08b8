"""Survival of 226 patients with advanced lung cancer: Cox's model, stratified by 18 institutions.

Each institution has a hazard of its own, of any shape, which the partial likelihood leaves out. A
patient who dies is compared with the patients of the same institution who were still alive. So the
rows of a silo depend on each other, and ``row_wise=False`` says so. Ties are broken as by Breslow.

References: Cox (1972), J. R. Stat. Soc. B 34, 187-220 (the model); Loprinzi et al. (1994), J. Clin.
Oncol. 12, 601-607 (the data).
"""

import lung_survival
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return one silo per institution."""
    return lung_survival.silos()


def model(x, years, died, institution, institutions):  # type: ignore[no-untyped-def]
    # coefficients of age, female, ecog
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    eta = x @ beta
    log_risk = fed.log_risk(eta, years, institution)
    with fed.silo_plate("patients", x.shape[0], row_wise=False):
        numpyro.factor("partial_likelihood", died * (eta - log_risk))


if __name__ == "__main__":
    main("Stratified Cox", model, silos, "stratified_cox")
