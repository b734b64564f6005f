"""Traces of nodes, in the forms in which they are published."""

OWN = """\
{"format":"bamboo-trace","version":1,"duration":7200.0,"source":"made for a test"}
{"at":0.0,"price":1.0,"zone":"east","onDemand":3.0}
{"at":0.0,"add":"n1","zone":"east-a"}
{"at":0.0,"add":"n2","zone":"east-b"}
{"at":1800.0,"price":2.0,"zone":"east-b"}
{"at":3600.0,"remove":"n2","zone":"east-b","notice":120.0}
"""
