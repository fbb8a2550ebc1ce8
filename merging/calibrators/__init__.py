"""The built-in calibrators: name -> where its class is."""

BUILTIN = {
    "featcal": "merging.calibrators.featcal:FeatCal",
    "surgery": "merging.calibrators.surgery:Surgery",
    "prob_surgery": "merging.calibrators.prob_surgery:ProbSurgery",
}
