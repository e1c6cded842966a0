"""A plugin of pytest that runs other tests with raytf's replacements in Keras: `-p tests.compat.keras_plugin`."""


def pytest_configure(config):
    from raytf.parallel import trainer

    trainer.install()
