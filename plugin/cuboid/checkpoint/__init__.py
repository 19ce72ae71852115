"""The checkpoint format, and how the ranks write and read it together. Depends on torch only, not on any framework.

Saving: :class:`~cuboid.checkpoint.saver.Saver` takes each rank's :class:`~cuboid.checkpoint.contents.Contents`,
``file_plan`` assigns every tensor to a writer, ``exchange`` gathers its shards there, ``writer`` writes the files, and
``format.folder`` renames the finished folder into place. Loading: ``loader`` finds and verifies a checkpoint, and
``reader`` reads only the elements that a rank owns, so that any layout can load what another one saved.
"""
