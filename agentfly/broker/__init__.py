"""The resource engine as an HTTP service, so that many processes share one bound, and its client."""
