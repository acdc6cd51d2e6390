"""Buckets: an S3 backend (boto3), for AWS and for the servers that speak its protocol.

Only this package imports boto3, botocore and tenacity, which come with the extra ``s3``.
"""
