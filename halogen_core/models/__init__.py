"""Model definitions over one parametrised decoder, composed from `spi.Ops`."""
