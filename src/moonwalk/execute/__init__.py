"""The parts that all kinds of segments share: residuals, precision, exponents, certificates, sinks."""
