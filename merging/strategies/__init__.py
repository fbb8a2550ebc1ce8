"""The built-in merge rules: name -> where its class is. One published method, one file."""

BUILTIN = {
    "average": "merging.strategies.average:Average",
    "task_arithmetic": "merging.strategies.task_arithmetic:TaskArithmetic",
    "ties": "merging.strategies.ties:Ties",
    "dare": "merging.strategies.dare:Dare",
    "dare_ties": "merging.strategies.dare_ties:DareTies",
    "della": "merging.strategies.della:Della",
    "breadcrumbs": "merging.strategies.breadcrumbs:Breadcrumbs",
    "sce": "merging.strategies.sce:Sce",
    "slerp": "merging.strategies.slerp:Slerp",
    "karcher": "merging.strategies.karcher:Karcher",
    "model_stock": "merging.strategies.model_stock:ModelStock",
    "regmean": "merging.strategies.regmean:RegMean",
    "regmean_plus_plus": "merging.strategies.regmean_plus_plus:RegMeanPlusPlus",
    "chain_of_merges": "merging.strategies.chain_of_merges:ChainOfMerges",
    "checkpoint": "merging.strategies.checkpoint:Checkpoint",
}
