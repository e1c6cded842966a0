"""The only access to private parts of Keras, TensorFlow, Ray and pyarrow: no other room uses them.

* Names in `keras`, `keras_objects`, `tensorflow`, `ray_core`, `ray_configs`, `ray_train`, `ray_data`, `ray_tune` state
  their purpose and missing public API in one line. `python -m tests.unit.compat` lists them.
* A *replacement* is a function that replaces one of Keras or TensorFlow. `@patch` of `patching` declares it next to its
  concept in `parallel`. It takes effect when a worker installs it.
* A *tested version* is one of `versions.TESTED`. Only this room handles their differences. Any other version must have
  the imported names, and make a correct step (`parallel/step_check.py`).
"""
