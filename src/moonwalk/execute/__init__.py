"""What every way to differentiate is made of: residuals, precision, exponents, certificates, sinks."""
