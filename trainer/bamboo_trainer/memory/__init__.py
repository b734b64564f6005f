"""What a worker keeps where: device and host memory, what backwards need, and how much a job will need in all."""
