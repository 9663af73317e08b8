"""Exam results of 4,059 pupils in 65 London schools, eight silos of schools or one per school.

The model regresses the score at 16 on the score at 11 and the pupil's sex, with an intercept and a
slope of each school. Schools are local, and pupils point to their school. With one school per silo
the smallest silo has two pupils.

References: Goldstein et al. (1993), A multilevel analysis of school examination results, Oxford
Review of Education 19, 425-433 (the data); Rasbash et al. (2000), A user's guide to MLwiN (this
model).
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from _beside_nuts import main
from _data import path

import numpyro_fed as fed

NUM_SILOS = 8


def data() -> pd.DataFrame:
    """Return the table as published."""
    return pd.read_csv(
        path("mixed_models", "Exam.csv", "R's package mlmRev (write.csv of Exam)", "4,059 rows")
    )


def school_numbers(table: pd.DataFrame) -> np.ndarray:
    """Return the school of each pupil, 0 to 64, in the order of the published numbers 1 to 65."""
    return table["school"].to_numpy(int) - 1


def silos(num_silos: int = NUM_SILOS) -> fed.Silos:
    """Return silos of neighboring school numbers, with about as many schools each."""
    table = data()
    school = school_numbers(table)
    schools = np.arange(school.max() + 1)
    return fed.split(
        {
            "score": table["normexam"].to_numpy(np.float32),
            "before": table["standLRT"].to_numpy(np.float32),
            "male": (table["sex"] == "M").to_numpy(np.float32),
            "school": school,
            "schools": schools,
        },
        by=school * num_silos // len(schools),
        rows={
            "score": "pupils",
            "before": "pupils",
            "male": "pupils",
            "school": "pupils",
            "schools": "schools",
        },
        index={"school": "schools"},
    )


def silos_by_school() -> fed.Silos:
    """Return one silo per school."""
    return silos(65)


def model(score, before, male, school, schools):  # type: ignore[no-untyped-def]
    # coefficients of 1, score at 11, male
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(0.5).expand([2]).to_event(1))
    root = numpyro.sample("correlation_cholesky", dist.LKJCholesky(2, 2.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with fed.silo_plate("schools", schools.shape[0]):
        # centered around beta, since 60 pupils inform their school's intercept and slope well
        own = numpyro.sample(
            "own", dist.MultivariateNormal(jnp.zeros(2), scale_tril=tau[:, None] * root)
        )
    with fed.silo_plate("pupils", score.shape[0]):
        means = beta[0] + own[school, 0] + (beta[1] + own[school, 1]) * before + beta[2] * male
        numpyro.sample("score", dist.Normal(means, sigma), obs=score)


if __name__ == "__main__":
    main("Exam", model, silos, "exam")
