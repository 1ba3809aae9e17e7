"""Export: merging, conversion, certificates, serving, bundles and hub uploads."""
