"""KubeRay's schemas, and what the tests need to check manifests against them."""
