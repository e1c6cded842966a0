"""The one door to what Keras, TensorFlow, Ray and pyarrow do not make public: no other room names it.

* `keras`, `keras_objects`, `tensorflow`, `ray_core`, `ray_configs`, `ray_train`, `ray_data`, `ray_tune`: each function,
  class and import says in a line what it is for and which public way is missing. `python -m raytf.compat` lists them.
* A *replacement* is a function that stands in the place of one of Keras or TensorFlow: `@patch` in `patching`, at home
  with its concept in `parallel`. They are made when a worker installs them.
* A *tested version* is one of `versions.TESTED`. What differs between those is told apart here and nowhere else. Any
  other version must have the names that are imported here, and make a right step (`parallel/step_check.py`).
"""
