"""The built-in merge rules: name -> where its class is. One published method, one file."""

BUILTIN = {
    "average": "merging.strategies.average:Average",
    "task_arithmetic": "merging.strategies.task_arithmetic:TaskArithmetic",
    "ties": "merging.strategies.ties:Ties",
    "regmean": "merging.strategies.regmean:RegMean",
    "regmean_plus_plus": "merging.strategies.regmean_plus_plus:RegMeanPlusPlus",
    "chain_of_merges": "merging.strategies.chain_of_merges:ChainOfMerges",
    "checkpoint": "merging.strategies.checkpoint:Checkpoint",
}
