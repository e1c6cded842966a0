"""The beginning of a TFJob, and of one of its replicas, to which a test adds the rest of the container."""

TFJOB = """
apiVersion: kubeflow.org/v1
kind: TFJob
metadata: {name: mnist, namespace: kubeflow}
spec:
  runPolicy: {cleanPodPolicy: None}
  tfReplicaSpecs:
"""
# % (role, number of replicas)
REPLICA = """
    %s:
      replicas: %d
      restartPolicy: Never
      template:
        spec:
          containers:
            - name: tensorflow
              image: kubeflow/sample:latest
"""
