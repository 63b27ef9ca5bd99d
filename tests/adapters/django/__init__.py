"""Tests of the backend for django.tasks and of the outbox for Django."""
