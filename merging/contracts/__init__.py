"""The abstract classes: what a backbone, a merge rule and a calibrator must say of themselves."""
